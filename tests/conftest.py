"""Fixtures that provide tiny random models, heads and a local hub, without downloads."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.heads.dflash import DFlashHeads
from draftsmith.checkpoints.heads.dspark import DSparkHeads
from draftsmith.checkpoints.heads.eagle import EagleHeads
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # more threads do not speed up tiny models, and test runs may share a machine


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    """Return a function that builds a random Llama: `make_llama(vocab_size=16, seed=1, num_hidden_layers=2, ...)`."""

    def build(vocab_size: int = 64, seed: int = 0, sharpness: float = 1.0, **overrides: object) -> LlamaForCausalLM:
        settings = {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        } | overrides
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # the default initialisation gives flat distributions
                if parameter.dim() == 2:
                    parameter.normal_(0.0, sharpness * parameter.shape[1] ** -0.5)
        return model

    return build


@pytest.fixture
def make_eagle() -> Callable[..., EagleHeads]:
    """Return a function that builds random EAGLE-3 heads for a two-layer model: `make_eagle(model, proposed=ids)`."""

    def build(model: LlamaForCausalLM, proposed: torch.Tensor | None = None, norms: Sequence[str] = ()) -> EagleHeads:
        return randomise(EagleHeads.for_target(model.config, layers=[0, 1], proposed=proposed, norms=norms), model)

    return build


@pytest.fixture
def make_dflash() -> Callable[..., DFlashHeads]:
    """Return a function that builds a random DFlash drafter for a model: `make_dflash(model, proposed=ids)`."""

    def build(
        model: LlamaForCausalLM, proposed: torch.Tensor | None = None, block_size: int = 5, num_layers: int = 2
    ) -> DFlashHeads:
        sizes = (model.config.vocab_size - 1, block_size, num_layers, [*range(1, model.config.num_hidden_layers)])
        return randomise(DFlashHeads.for_target(model.config, *sizes, proposed), model)

    return build


@pytest.fixture
def make_dspark() -> Callable[..., DSparkHeads]:
    """Return a function that builds a random DSpark drafter of four tokens: `make_dspark(model, proposed=ids)`."""

    def build(
        model: LlamaForCausalLM, proposed: torch.Tensor | None = None, from_anchor: bool = True, rank: int = 6
    ) -> DSparkHeads:
        layers = [*range(1, model.config.num_hidden_layers)]
        sizes = (model.config.vocab_size - 1, 4 if from_anchor else 5, 1, layers, proposed)
        return randomise(DSparkHeads.for_target(model.config, *sizes, rank=rank, from_anchor=from_anchor), model)

    return build


def randomise(heads: Any, model: LlamaForCausalLM) -> Any:
    """Set random weights, and attach the target's embeddings and output projection."""
    torch.manual_seed(3)
    for name, weight in heads.named_parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.4)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return heads.to(model.dtype).attach(*weights).requires_grad_(False).eval()


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of shared real data; skip the test if it does not exist."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("DRAFTSMITH_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"there is no shared data at {folder}; set DRAFTSMITH_SHARED")
    return folder


class RandomHeads(torch.nn.Module):
    """Prediction heads with random weights."""

    def __init__(self, num_heads: int, hidden_size: int, vocab_size: int, seed: int = 5) -> None:
        super().__init__()
        self.num_heads = num_heads
        generator = torch.Generator().manual_seed(seed)
        self.weight_KVD = torch.randn(num_heads, vocab_size, hidden_size, generator=generator)

    def forward(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("kvd,...d->...kv", self.weight_KVD, hidden_XD)


@pytest.fixture
def make_heads() -> type[RandomHeads]:
    """Return the class of random prediction heads: `make_heads(num_heads, hidden_size, vocab_size)`."""
    return RandomHeads


@pytest.fixture(scope="session")
def load_script() -> Callable[[Path], ModuleType]:
    """Return a function that imports a Python file by its path, such as a benchmark script."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module by name
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def build_family(load_script: Callable[[Path], ModuleType]) -> Callable[..., Any]:
    """Return a function that builds a tiny random model of a type: `build_family("qwen3", vocab_size=320)`."""
    bench = Path(__file__).with_name("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(bench))
        script = load_script(bench / "families.py")
    return lambda kind, **overrides: script.build(kind, overrides).requires_grad_(False)


@pytest.fixture(scope="session")
def stand_in(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """Return the module that simulates the hub locally."""
    return load_script(Path(__file__).with_name("checkpoints") / "hub_stand_in.py")


@pytest.fixture
def hub(stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a local hub, to which the hub client of this process is logged in."""
    with stand_in.running_hub() as server:
        stand_in.point_client(server.url, tmp_path / "home", monkeypatch, stand_in.TOKEN)
        yield server
