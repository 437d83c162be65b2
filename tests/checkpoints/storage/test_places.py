"""Names of models: missing paths are reported immediately, and an unreachable hub is queried only once."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.storage.places import check_location, out_of_reach
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model


@pytest.mark.parametrize("load", [check_location, load_model], ids=lambda load: load.__name__)
def test_a_missing_path_is_not_looked_up_on_the_hub(
    load: Callable[[str], object], hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "quickstart" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("runs/nothing/target", "./runs/quickstart/targets/"):
        with pytest.raises(ValueError, match=f"folder {name}"):
            load(name)
    check_location("runs/quickstart/target")
    assert hub.requests == []
    for plain in ("gpt2", "user/drafter"):  # these may be on the hub
        check_location(plain)


def test_an_unreachable_hub_is_queried_once(stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                connection, _ = server.accept()
                connections.append(connection)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        stand_in.point_client(url, tmp_path / "home", monkeypatch)
        for load in (load_tokenizer, load_model, load_tokenizer):
            with pytest.raises(ValueError, match=f"user/nowhere.*{url} cannot be reached"):
                load("user/nowhere")
        assert url in out_of_reach()
        assert len(connections) == 1
