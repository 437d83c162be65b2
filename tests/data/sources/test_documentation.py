"""Corpus of the documentation of installed packages: parsed without imports, reproducible, split without leaks."""

import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.conversations import Conversation
from draftsmith.data.sources.documentation import documentation_conversations

Corpus = tuple[list[Conversation], list[Conversation], dict[str, Any]]

NUMPY_STYLE = """Solve the linear equation set `a @ x == b` for the unknown x.

    If the data matrix is known to be a particular type, then supplying the
    corresponding string to ``assume_a`` chooses the dedicated solver, see
    :func:`~some.module.other_solver`.

    .. versionadded:: 1.0
        This line belongs to the directive and goes with it.

    Parameters
    ----------
    a : (N, N) array_like
        Square input data, which is not
        changed.
    lower, upper : bool, optional
        Ignored if nothing is symmetric. Default is False.

    Returns
    -------
    x : ndarray
        The solution array.

    Examples
    --------
    Given `a` and `b`, solve for `x`:

    >>> a = np.array([[3, 2, 0], [1, -1, 0], [0, 5, 1]])
    >>> solve(a, b)
    array([ 2., -2.,  9.])
    """

GOOGLE_STYLE = """Load the weights from a folder and check that they fit the model.

    Nothing is changed where the check fails.

    Args:
        folder (str): The folder to read, which
            must exist.
        strict: Whether every weight has to be there. Default: ``True``.

    Returns:
        A list of the names that were loaded.

    Example::

        >>> load_weights("runs/first", strict=False)
        ['first.weight', 'second.weight']
    """


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return the corpus of the standard library and of two small packages that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    padding = "Words that make this docstring long enough to be worth reading as a whole. " * 5
    unique = "".join(
        f'def function_{i}():\n    """Return the number {i} as nothing else in this module does it. {padding}"""\n\n'
        for i in range(200)
    )
    files = {
        "fakedocs/__init__.py": 'raise RuntimeError("imported")\n',
        "fakedocs/_solver.py": f'"""How the private file is organised inside. {padding}"""\n'
        f'raise RuntimeError("imported")\n\ndef solve(a, b):\n    """{NUMPY_STYLE}"""\n\n'
        f'class Loader:\n    def load(self, folder):\n        """{GOOGLE_STYLE}"""\n\n'
        f'def _private():\n    """A private function, whose documentation is hidden. {padding}"""\n',
        "fakedocs/many.py": unique,
        "fakedocs/tests/it.py": f'def test():\n    """The text of a test that is not documentation. {padding}"""\n',
        "fakedocs/broken.py": f'"""The docstring of a file that does not parse. {padding}"""\ndef (:\n',
        "fakecopy/__init__.py": unique + f'def solve(a, b):\n    """{NUMPY_STYLE}"""\n',
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        result = documentation_conversations(["fakedocs", "fakecopy", "no_such_package"], heldout_share=0.1)
    assert "fakedocs" not in sys.modules
    return result


def _by_id(corpus: Corpus) -> dict[str, Conversation]:
    return {c.id: c for c in [*corpus[0], *corpus[1]]}


def test_a_conversation_has_description_parameters_and_example(corpus: Corpus) -> None:
    turns = _by_id(corpus)["fakedocs.solve"].turns
    assert [t.role for t in turns] == ["user", "assistant"] * 3
    assert "`fakedocs.solve`" in turns[0].text
    assert turns[1].text == (
        "Solve the linear equation set `a @ x == b` for the unknown x.\n\nIf the data matrix is known to be a "
        "particular type, then supplying the corresponding string to `assume_a` chooses the dedicated solver, see "
        "`some.module.other_solver`."
    )
    assert turns[3].text == (
        "- `a` ((N, N) array_like): Square input data, which is not changed.\n"
        "- `lower, upper` (bool, optional): Ignored if nothing is symmetric. Default is False."
    )
    assert turns[5].text == (
        ">>> a = np.array([[3, 2, 0], [1, -1, 0], [0, 5, 1]])\n>>> solve(a, b)\narray([ 2., -2.,  9.])"
    )


def test_google_style_and_methods(corpus: Corpus) -> None:
    turns = _by_id(corpus)["fakedocs.Loader.load"].turns
    assert turns[1].text.endswith("fit the model.\n\nNothing is changed where the check fails.")
    assert turns[3].text == (
        "- `folder` (str): The folder to read, which must exist.\n"
        "- `strict`: Whether every weight has to be there. Default: `True`."
    )
    assert turns[5].text.startswith('>>> load_weights("runs/first", strict=False)\n')


def test_private_objects_tests_and_invalid_files_are_skipped(corpus: Corpus) -> None:
    everything = "".join(t.text for c in _by_id(corpus).values() for t in c.turns)
    assert "number 17 as nothing else" in everything
    for text in (
        "private file is organised",
        "whose documentation is hidden",
        "that is not documentation",
        "file that does not parse",
    ):
        assert text not in everything


def test_texts_are_used_once_and_on_one_side_of_the_split(corpus: Corpus) -> None:
    train, heldout, report = corpus
    first_answers = [c.turns[1].text for c in [*train, *heldout]]
    assert len(set(first_answers)) == len(first_answers)
    assert report["duplicates"] >= 201, "every function of the copied package is a duplicate"
    assert report["packages"]["fakecopy"]["conversations"] == 0


def test_the_split_depends_on_the_name_inside_the_module(corpus: Corpus, tmp_path: Path) -> None:
    """Renaming a package must not move an object between training and held-out data."""
    padding = "Other words, so that no text equals one of the first package, but long enough to be taken. " * 4
    source = "".join(f'def function_{i}():\n    """Number {i} once more. {padding}"""\n\n' for i in range(200))
    (tmp_path / "renamed").mkdir()
    (tmp_path / "renamed" / "__init__.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        _, heldout, _ = documentation_conversations(["renamed"], heldout_share=0.1)
    again = {c.id.rsplit(".", 1)[1] for c in heldout if c.id.startswith("renamed.")}
    first = {c.id.rsplit(".", 1)[1] for c in corpus[1] if c.id.startswith("fakedocs.many.")}
    assert again == first
    assert 5 < len(first) < 45  # the expected number is 20 of 200


def test_a_budget_is_met_spread_and_reproducible() -> None:
    one = documentation_conversations(["numpy"], max_megabytes=0.3, seed=1)
    two = documentation_conversations(["numpy"], max_megabytes=0.3, seed=1)
    other = documentation_conversations(["numpy"], max_megabytes=0.3, seed=2)
    assert one == two
    assert one[0] != other[0]
    report = one[2]
    assert not report["complete"]
    assert 300_000 <= report["bytes"] < 400_000, "the corpus ends with the file that exceeds the budget"
    shares = [package["bytes"] / report["bytes"] for package in report["packages"].values()]
    assert len(shares) == 2
    assert min(shares) > 0.3
