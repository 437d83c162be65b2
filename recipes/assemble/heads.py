"""Construction of the training run of prediction heads: target, heads and acceptance measurement.

Shape suffixes: V vocabulary size, D hidden size, X positions.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.artifact.compat import save_tokenizer
from ...checkpoints.artifact.locate import find_folder
from ...checkpoints.artifact.model_ref import resolve_model
from ...checkpoints.heads.auxiliary import AuxiliaryHeads, input_embeddings
from ...checkpoints.heads.dflash import DFlashHeads, save_dflash
from ...checkpoints.heads.dspark import DSparkHeads
from ...checkpoints.heads.eagle import EagleHeads, save_eagle
from ...checkpoints.heads.files import PredictionHeads, save_heads
from ...checkpoints.heads.logits import LogitShape
from ...checkpoints.heads.published import published_kind, read_auxiliary
from ...checkpoints.storage.names import CONFIG_FILE, WHOLE_FILES
from ...checkpoints.table.table import BigramTable
from ...data.blocks.packing import PADDING
from ...train.config import Medusa2
from ...train.forward.packed import PackedForward
from ...train.parallel.accelerate import zero_stage
from ...train.tasks.dflash import DFlashTask, DSparkTask
from ...train.tasks.heads import EagleTask, HeadsTask
from ...train.tasks.medusa2 import Medusa2Task
from ...train.teachers.teacher import CachedHidden
from ..schema.data import Section
from ..schema.training import HeadsRecipe, ModelSection
from .acceptance import heads_measure
from .artifact import Run
from .data import Prepared
from .drafter import choose_mask, frequent_tokens
from .models import TrainableModel, add_lora, check_vocabulary, load_trainable
from .teacher import open_caches

BASE = "base"
"""Subdirectory of the artifact for a target that is trained jointly with its heads."""
_FIT_BLOCKS = 8  # of the training data, for the scale of the Markov head's start


def _check_launch(recipe: HeadsRecipe, task: HeadsTask, accelerator: Any) -> None:
    """Raise ValueError if DeepSpeed would change the dtype of a target that is trained jointly with its heads."""
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.train.precision)
    if recipe.base is not None and zero_stage(accelerator) and precision not in (None, task.target.dtype):
        name, cast = (str(dtype).removeprefix("torch.") for dtype in (task.target.dtype, precision))
        raise ValueError(f"DeepSpeed would cast the {name} target to {cast}: set `target_dtype: {cast}`")


def make_heads_run(recipe: HeadsRecipe, tokenizer: Any, prepare: Callable[[], Prepared], accelerator: Any) -> Run:
    """Prepare the data, load the target, create its heads, and return the training run."""
    prepared, device, ref = prepare(), accelerator.device, resolve_model(recipe.target)
    target = load_trainable(ref.path, decoder=True, device=str(device), dtype=recipe.target_dtype)
    check_vocabulary(len(tokenizer), target, recipe.target)
    heads: Any = _new_heads(recipe, target, prepared)
    base = None
    if recipe.base is not None:
        section = ModelSection(source=recipe.target, lora=recipe.base.lora)
        torch.manual_seed(recipe.train.seed)
        base = TrainableModel(target, recipe.base.lora, add_lora(target, section))
    task = _make_task(recipe, tokenizer, prepared, target, heads)
    task.settings["hash of the target"] = ref.sha256
    _check_launch(recipe, task, accelerator)
    names = ("num_heads", "num_layers", "hidden_size", "vocab_size", "projection_kind", "rank", "states")
    shapes = {name: getattr(heads, name) for name in names if hasattr(heads, name)}
    shapes["architecture"] = recipe.architecture
    if isinstance(heads, DFlashHeads):
        shapes |= heads.facts
    if heads.proposed is not None:
        shapes["proposed_tokens"] = len(heads.proposed)
    made_for, sha256 = recipe.target, ref.sha256
    size = sum(p.numel() for p in heads.parameters()) * target.dtype.itemsize
    if base is not None:
        made_for, sha256, shapes["trained_from"] = str(Path(recipe.out) / BASE), None, recipe.target
        size += base.saved_bytes()

    def write(folder: Path) -> None:
        converted = heads.to(target.dtype)
        if recipe.architecture == "medusa":
            save_heads(converted, folder, made_for)
        elif recipe.architecture == "eagle3":
            save_eagle(converted, folder)
        else:
            save_dflash(converted, folder)
        if base is not None:
            base.save(folder / BASE)
            save_tokenizer(tokenizer, folder / BASE)

    measured = recipe.measure.prompts > 0
    return Run(recipe, tokenizer, prepared, task, write, shapes, size, made_for, sha256, measured)


def _make_task(recipe: HeadsRecipe, tokenizer: Any, prepared: Prepared, target: Any, heads: Any) -> HeadsTask:
    """Return the training task of a recipe, including the acceptance measurement."""
    states = None if recipe.hidden.cache is None else CachedHidden(*open_caches(recipe, prepared))
    dynamic = recipe.slot_weights == "d-pace"
    common: dict[str, Any] = {
        "head_weights": [1.0 if dynamic else recipe.weight_decay_by_head**head for head in range(recipe.num_heads)],
        "objective": recipe.objective,
        "temperature": recipe.temperature,
        "evaluate_fn": heads_measure(recipe, target, tokenizer, prepared) if recipe.measure.prompts else None,
        "evaluate_blocks": recipe.measure.blocks,
    }
    heldout = prepared.heldout if recipe.measure.blocks else None
    task: HeadsTask
    if recipe.architecture == "dflash":
        task = DFlashTask(target, heads, heldout, states=states, anchors=recipe.anchors, dynamic=dynamic, **common)
    elif recipe.architecture == "dspark":
        common |= {"anchors": recipe.anchors, "confidence_weight": recipe.dspark.confidence_weight}
        if recipe.dspark.markov_start is not None:
            rows = range(min(_FIT_BLOCKS, prepared.train.blocks))
            common["table"] = BigramTable.load(Path(recipe.dspark.markov_start))
            common["fit_batch"] = prepared.train.batch(rows).to(target.device)
        task = DSparkTask(target, heads, heldout, states=states, **common)
        task.settings["dspark"] = recipe.dspark.model_dump(mode="json")
    elif recipe.architecture == "eagle3":
        task = EagleTask(target, heads, heldout, states=states, **common)
    elif recipe.base is None:
        task = HeadsTask(target, heads, heldout, states=states, **common)
    else:
        numbers = recipe.base.model_dump(exclude={"lora"})
        task = Medusa2Task(target, heads, heldout, Medusa2(**numbers), **common)
        task.settings["lora"] = recipe.base.lora.model_dump(mode="json", exclude={"export"})
    if recipe.hidden.cache is not None and not recipe.measure.prompts:
        _drop_layers(target)  # training uses only its embeddings and output layer
    # Settings that change the training or its metrics; a run with other settings cannot resume.
    task.settings["target_dtype"] = str(target.dtype)
    task.settings["heads"] = [recipe.num_heads, recipe.num_layers, recipe.projection, recipe.rank, heads.states]
    if recipe.norms:
        task.settings["norms"] = [*heads.norms]
    if recipe.start is not None:
        task.settings["start"] = recipe.start
    if recipe.drafts_blocks:
        task.settings["mask_token"] = heads.mask
    if recipe.vocabulary is not None:
        task.settings["vocabulary"] = recipe.vocabulary.tokens
    task.settings["hidden"] = None if states is None else states.settings
    task.settings["measure"] = recipe.measure.model_dump(mode="json", exclude={"keep"})
    return task


def _drop_layers(target: Any) -> None:
    """Remove the layers of a decoder to free memory."""
    decoder = target.get_decoder()
    for name, layers in [*decoder.named_children()]:
        if isinstance(layers, nn.ModuleList):
            setattr(decoder, name, nn.ModuleList())


def _new_heads(recipe: HeadsRecipe, target: Any, prepared: Prepared) -> PredictionHeads | AuxiliaryHeads:
    """Create heads initialised from the target, in float32, because 16-bit weights would lose small updates."""
    head, proposed = target.get_output_embeddings(), None
    if recipe.vocabulary is not None:
        proposed = frequent_tokens(recipe.vocabulary.tokens, len(head.weight), prepared, "heads")
    if recipe.architecture != "medusa":
        return _new_auxiliary(recipe, target, prepared, proposed)
    shape, scale = LogitShape.of(target.config.get_text_config(decoder=True)), 1.0
    start_VD = head.weight.detach().float() * shape.scale
    if recipe.states == "before-norm":
        scale, norm_D = _fit_before_norm(target, prepared)
        start_VD = start_VD * norm_D
    forms = (recipe.projection, recipe.rank, recipe.states)
    heads = PredictionHeads.from_lm_head(start_VD, recipe.num_heads, recipe.num_layers, *forms, scale=scale)
    if proposed is not None:
        heads.propose(proposed)
    if recipe.projection == "target":
        heads.attach(head.weight, head.bias, shape)
    return heads


def _new_auxiliary(recipe: HeadsRecipe, target: Any, prepared: Prepared, proposed: Tensor | None) -> AuxiliaryHeads:
    """Create EAGLE-3 heads or a block drafter, initialised from the target, in float32."""
    weights = (input_embeddings(target), target.get_output_embeddings().weight)
    if recipe.start is not None:
        heads = load_start(recipe, target).to(target.device, torch.float32)
        return heads.attach(*weights).train().requires_grad_(True)
    torch.manual_seed(recipe.train.seed)
    mask = 0
    if recipe.drafts_blocks:
        mask = choose_mask("mask_token", recipe.mask_token, prepared, len(weights[1]), "heads")
    heads = build_auxiliary(recipe, target.config, mask, proposed)
    return heads.to(target.device).attach(*weights).begin_as(target)


def load_start(recipe: HeadsRecipe, target: Any) -> AuxiliaryHeads:
    """Load the heads or the block drafter that training starts from.

    Raises ValueError if they do not fit the target, or a size in the recipe differs from that of the loaded weights.
    """
    folder = find_folder(str(recipe.start), [CONFIG_FILE, WHOLE_FILES[0]])
    if (kind := published_kind(folder)) is None:
        known = "EAGLE-3 heads, or of a DFlash or DSpark drafter"
        raise ValueError(f"`start`: {folder / CONFIG_FILE} is not that of {known}")
    embedding_VD = target.get_input_embeddings().weight.detach()
    heads = read_auxiliary(folder, target.config.get_text_config(decoder=True), embedding_VD)
    sizes: dict[str, Any] = {"architecture": kind, "layers": [*heads.layers]}
    sizes["vocabulary"] = None if heads.proposed is None else {"tokens": len(heads.proposed)}
    if isinstance(heads, EagleHeads):
        sizes["norms"], heads.num_heads = [*heads.norms], recipe.num_heads
    if isinstance(heads, DFlashHeads):
        sizes |= {"num_heads": heads.num_heads, "num_layers": len(heads.layer_stack), "mask_token": heads.mask}
    if isinstance(heads, DSparkHeads):
        sizes["dspark.markov_rank"], sizes["dspark.sample_from_anchor"] = heads.rank, heads.first_slot == 0
    for name, value in sizes.items():
        section, _, key = name.rpartition(".")
        setting = getattr(getattr(recipe, section) if section else recipe, key)
        setting = setting.model_dump() if isinstance(setting, Section) else setting
        if setting != value and not (setting is None and name in ("layers", "mask_token")):
            actual = json.dumps(value)
            raise ValueError(f"`{name}` is {json.dumps(setting)}, but {recipe.start} has {actual}: set {name}={actual}")
    return heads


def build_auxiliary(
    recipe: HeadsRecipe, config: Any, mask: int = 0, proposed: Tensor | None = None
) -> EagleHeads | DFlashHeads:
    """Create the EAGLE-3 heads or block drafter of a recipe for a target's configuration, with random weights."""
    config = config.get_text_config(decoder=True)
    if recipe.architecture == "eagle3":
        return EagleHeads.for_target(config, recipe.layers, proposed, recipe.num_heads, recipe.norms)
    kind, size, options = DFlashHeads, recipe.num_heads + 1, dict[str, Any]()
    if recipe.architecture == "dspark":
        from_anchor = recipe.dspark.sample_from_anchor
        kind, size = DSparkHeads, recipe.num_heads + (not from_anchor)
        options = {"rank": recipe.dspark.markov_rank, "from_anchor": from_anchor}
    sizes = (mask, size, recipe.num_layers, recipe.layers, proposed)
    return kind.for_target(config, *sizes, **options)


@torch.no_grad()
def _fit_before_norm(target: Any, prepared: Prepared) -> tuple[float, Tensor]:
    """Fit a scale and weights, [D], that approximate the final norm on a held-out block.

    The scale normalizes pre-norm hidden states to a root mean square of 1. The weights map the scaled states to
    post-norm states by least squares, so that new heads approximate the target's output layer.
    """
    if not prepared.heldout.blocks:
        raise ValueError("`states: before-norm` requires a held-out block: increase `data.heldout_share`")
    forward = PackedForward(target, "before-norm")
    batch = prepared.heldout.batch([0]).to(target.device)
    before_XD = forward.hidden(batch)[batch.documents_BT != PADDING]
    after_XD = forward.after_norm(before_XD).float()
    scale = 1 / float(before_XD.float().square().mean().sqrt().clamp(min=1e-12))
    before_XD = before_XD.float() * scale
    return scale, (after_XD * before_XD).sum(0) / before_XD.square().sum(0).clamp(min=1e-12)
