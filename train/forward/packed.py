"""Forward passes of causal LMs on packed blocks, which return last hidden states or logits.

Letters: B batch (blocks), T tokens, D hidden, V vocabulary, N documents including the padding of each block.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...checkpoints.heads.auxiliary import decoder_layers
from ...checkpoints.heads.logits import LogitShape
from ...checkpoints.verify.windows import sliding_window
from ...data.blocks.packing import PADDING, Batch
from ...decode.models.base import bare_model, masked_attention
from ...decode.models.final_norm import check_states, final_norm, module_inputs, parse_layers
from .attention import NAME, document_spans, register
from .seq2seq import BaseForward, SourceForward

_ROUGH_TOLERANCE = 0.1  # `_PROBE_TOLERANCE` for 16-bit weights
_MAX_PAIR_SHARE = 0.7  # share of token pairs inside documents above which one call for the block is as fast
_PROBE_TOLERANCE = 1e-3  # relative to the largest value; a wrong head (bias, capping, scaling) exceeds it


class MaskedBatch(NamedTuple):
    """Packed tokens with an explicit attention mask, bool [B, T, T]. The other fields are as in `Batch`."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    visible_BTT: Tensor


def make_forward(model: Any) -> "PackedForward | SourceForward":
    """Create the forward pass of a model on packed blocks. Raises ValueError if the model is not supported."""
    return SourceForward(model) if model.config.is_encoder_decoder else PackedForward(model)


class PackedForward(BaseForward):
    """Forward pass of a transformers causal LM on packed blocks. Tokens attend only within their document.

    This is not an `nn.Module`, so that a frozen model is neither wrapped for data parallelism nor saved in a
    checkpoint. `states` selects the output of `hidden`: "after-norm" for the last hidden states, "before-norm" for the
    input of the final norm, or "layers-2-15" for the concatenated inputs of layers 2 and 15 and last hidden states.
    Models that cannot separate documents (ALiBi, recurrent layers, convolutions) run them as separate rows.
    Raises ValueError if the model is an encoder-decoder or lacks a final norm, or if `states` is unknown.
    """

    def __init__(self, model: Any, states: str = "after-norm") -> None:
        self._layers = parse_layers(states)
        if not self._layers:
            check_states(states)
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder, but a decoder is required")
        self.model = model = bare_model(model)
        self.config = model.config.get_text_config()
        parameters = inspect.signature(_decoder(model).forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        if "flash" in self._kernel and not takes_any:
            raise ValueError(
                f"{type(model).__name__} passes no arguments to its attention, so {self._kernel} would attend across "
                "the documents of a block; use sdpa or eager"
            )
        self.plain_head = has_plain_head(model)
        self._positions = _learned_positions(model)
        self.states, self._norm = states, None
        last = int(model.get_output_embeddings().weight.shape[1])
        self.width = last + len(self._layers) * self.config.hidden_size
        """Size of the hidden states that `hidden` returns."""
        layers: Any = decoder_layers(_decoder(model), self.config.num_hidden_layers) if self._layers else ()
        self._watched: list[nn.Module] = [layers[layer] for layer in self._layers]
        if states == "before-norm":
            self._norm = final_norm(_decoder(model))
            self._watched = [self._norm]
        self.by_row = "position_ids" not in parameters
        """True if documents are run as separate rows."""
        self.by_document = not self.by_row and _can_attend_by_document(model)
        if self.by_document and not _separates_documents(self):  # the decoder does not pass `spans` to its attention
            self.config._attn_implementation = "sdpa"
            self.by_document = False
        if not self.by_row and not self.by_document and not _separates_documents(self):
            self.by_row = True

    def __call__(self, batch: Batch | MaskedBatch) -> Tensor:
        """Return last hidden states [B, T, D] after the final norm, or logits [B, T, V] if `weight_VD()` is None."""
        if self.plain_head:
            return self._last_hidden(batch)
        return self._run(batch, lambda tokens, **options: self.model(tokens, **options).logits)

    def hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states selected by `states`: [B, T, D], or [B, T, G + D] with auxiliary hidden states."""
        return self._run(batch, self._selected_states)

    def after_norm(self, states_XD: Tensor) -> Tensor:
        """Convert the output of `hidden` to last post-norm hidden states [..., D]."""
        if self._layers:
            return states_XD[..., -self.config.hidden_size :]
        return states_XD if self._norm is None else self._norm(states_XD.to(self.model.dtype))

    def _selected_states(self, tokens_BT: Tensor, **options: Any) -> Tensor:
        with module_inputs(self._watched) as read:
            last_BTD = _decoder(self.model)(tokens_BT, **options).last_hidden_state
        states = read if self._norm is not None else [*read, last_BTD]
        return torch.cat([each.to(last_BTD.device).reshape(*tokens_BT.shape, -1) for each in states], -1)

    def _last_hidden(self, batch: Batch | MaskedBatch) -> Tensor:
        return self._run(batch, lambda tokens, **options: _decoder(self.model)(tokens, **options).last_hidden_state)

    def _run(self, batch: Batch | MaskedBatch, forward: Callable[..., Tensor]) -> Tensor:
        """Return the states of `forward(tokens, ...)` for a batch, [B, T, X]."""
        shape = batch.tokens_BT.shape
        if self.by_row:
            assert isinstance(batch, Batch)
            return _run_by_row(batch, forward)
        if "flash" in self._kernel and isinstance(batch, Batch):
            # one row, because these kernels take the document borders among all tokens
            states = forward(batch.tokens_BT.reshape(1, -1), use_cache=False, **_flash_attention(batch))
        else:
            states = forward(batch.tokens_BT, use_cache=False, **self._attention(batch))
        return states.reshape(*shape, -1)

    @property
    def _kernel(self) -> str:
        return getattr(self.config, "_attn_implementation", None) or "eager"

    def _clamp_positions(self, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Clamp positions of padding to the last position embedding. Raises ValueError if a document is too long."""
        if self._positions is None or positions_BT.shape[1] <= self._positions:
            return positions_BT
        longest = int(positions_BT[documents_BT != PADDING].amax()) + 1
        if longest > self._positions:
            raise ValueError(
                f"a document has {longest} tokens, but {type(self.model).__name__} has {self._positions} "
                "positions: prepare the data with smaller block_tokens"
            )
        return positions_BT.clamp(max=self._positions - 1)

    def check_masks(self) -> None:
        """Raise ValueError if the model or its attention kernel does not support the masks of a `MaskedBatch`."""
        if self.by_row:
            raise ValueError(
                f"`parallel` requires an attention mask of any form, which {type(self.model).__name__} does not support"
            )
        if "flash" in self._kernel:
            raise ValueError(f"`parallel` requires sdpa or eager attention, but the model uses {self._kernel}")

    def _attention(self, batch: Batch | MaskedBatch) -> dict[str, Any]:
        """Return the mask and positions that separate documents; a mask of None selects the model's causal kernel."""
        documents_BT, window = batch.documents_BT, sliding_window(self.config)
        positions_BT = self._clamp_positions(batch.positions_BT, documents_BT)
        if isinstance(batch, MaskedBatch):
            longest = int(positions_BT.max()) + 1
            if window is not None and longest > window:
                raise ValueError(f"`parallel`: a document has {longest} tokens, above the attention window {window}")
            return {"attention_mask": self._convert_mask(batch.visible_BTT[:, None]), "position_ids": positions_BT}
        if window is not None and batch.tokens_BT.shape[1] > window:
            # models with sliding windows build their own masks, and separate documents where positions restart
            return {"attention_mask": None, "position_ids": positions_BT}
        if bool(((documents_BT == documents_BT[:, :1]) | (documents_BT == PADDING)).all()):
            # one document per row before the padding: plain causal attention is exact
            rows, length = documents_BT.shape
            positions_BT = torch.arange(length, device=documents_BT.device).expand(rows, length)
            return {"attention_mask": None, "position_ids": self._clamp_positions(positions_BT, documents_BT)}
        if self.by_document and self._kernel == NAME and documents_BT.device.type == "cpu":
            spans = document_spans(documents_BT)
            lengths = [end - start for row in spans for start, end in row]
            if sum(length**2 for length in lengths) < _MAX_PAIR_SHARE * documents_BT.numel() * documents_BT.shape[1]:
                # the mask is not used, but a 4-D mask prevents transformers from making one
                unused_1111 = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype)
                return {"attention_mask": unused_1111, "position_ids": positions_BT, "spans": spans}
        return {"attention_mask": self._convert_mask(batch.attention_mask_B1TT()), "position_ids": positions_BT}

    def _convert_mask(self, mask_B1TT: Tensor) -> Tensor:
        """Convert a boolean mask to the form that the model's attention kernel requires."""
        if self._kernel in ("sdpa", NAME):
            return mask_B1TT
        added_B1TT = torch.zeros(mask_B1TT.shape, dtype=self.model.dtype, device=mask_B1TT.device)
        return added_B1TT.masked_fill_(~mask_B1TT, torch.finfo(self.model.dtype).min)


def _run_by_row(batch: Batch, forward: Callable[..., Tensor]) -> Tensor:
    """Return the states [B, T, X] of a forward whose rows are documents, in groups of similar length."""
    spans = [(row, *span) for row, borders in enumerate(document_spans(batch.documents_BT)) for span in borders]
    states = dict[tuple[int, int, int], Tensor]()
    for bits in {(end - start - 1).bit_length() for _, start, end in spans}:
        group = [(row, start, end) for row, start, end in spans if (end - start - 1).bit_length() == bits]
        rows = pad_sequence([batch.tokens_BT[row, start:end] for row, start, end in group], batch_first=True)
        pairs = zip(group, forward(rows, use_cache=False), strict=True)
        states |= {span: states_TX[: span[2] - span[1]] for span, states_TX in pairs}
    return torch.cat([states[span] for span in sorted(states)]).view(*batch.tokens_BT.shape, -1)


def _learned_positions(model: Any) -> int | None:
    """Return the number of learned position embeddings of a model, or None if it has none (rotary models)."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    # OPT's embedding table has two more rows than positions
    return limit if any(limit is not None and 0 <= table.num_embeddings - limit <= 2 for table in tables) else None


def _flash_attention(batch: Batch) -> dict[str, Any]:
    """Return arguments for flash attention: positions as one row, and cumulative lengths of documents and padding."""
    documents_BT = batch.documents_BT
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_N = starts_BT.flatten().nonzero()[:, 0]
    borders = torch.cat((starts_N, starts_N.new_tensor([documents_BT.numel()]))).int()
    longest = int(borders.diff().max())
    return {
        "attention_mask": None,
        "position_ids": batch.positions_BT.reshape(1, -1),
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _can_attend_by_document(model: Any) -> bool:
    """Switch a CPU model from SDPA to per-document attention if possible. Return True if the model uses it."""
    config = model.config.get_text_config()
    if next(model.parameters()).device.type != "cpu" or getattr(config, "sliding_window", None) is not None:
        return False
    if getattr(config, "_attn_implementation", None) == "sdpa":
        register()
        config._attn_implementation = NAME
    return getattr(config, "_attn_implementation", None) == NAME


def _separates_documents(forward: PackedForward) -> bool:
    """Check that the first document of a block does not change the hidden states of the second one."""
    model = forward.model
    device = next(model.parameters()).device
    tokens_BT = torch.tensor([[1, 2, 3, 2, 1, 3, 2]], device=device) % model.get_input_embeddings().weight.shape[0]
    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], device=device)
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=device)
    try:
        with _evaluating(model):
            packed_BTD = forward._last_hidden(Batch(tokens_BT, tokens_BT, positions_BT, documents_BT))[:, 3:].float()
            single_BTD = _decoder(model)(tokens_BT[:, 3:], use_cache=False).last_hidden_state.float()
    except TypeError:  # the decoder takes no keyword arguments for its attention
        if not forward.by_document:
            raise
        return False
    tolerance = _PROBE_TOLERANCE if model.dtype == torch.float32 else _ROUGH_TOLERANCE
    return bool((packed_BTD - single_BTD).abs().max() <= tolerance * single_BTD.abs().max())


def has_plain_head(model: Any) -> bool:
    """Check with three tokens if the logits are the last hidden state times the output projection."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    if not isinstance(head, nn.Linear) or head.bias is not None or LogitShape.of(config) != LogitShape():
        return False
    with _evaluating(model):
        tokens_BT = torch.arange(3, device=head.weight.device)[None] % head.weight.shape[0]
        hidden_BTD = _decoder(model)(tokens_BT, use_cache=False).last_hidden_state
        if hidden_BTD.shape[-1] != head.weight.shape[1]:
            return False
        expected_BTV = model(tokens_BT, use_cache=False).logits.float()
        actual_BTV = (hidden_BTD @ head.weight.T).float()
    return bool((expected_BTV - actual_BTV).abs().max() <= _PROBE_TOLERANCE * expected_BTV.abs().max().clamp(min=1e-6))


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Set a model to evaluation mode, without gradients, within a context. CPU models use masked attention."""
    was_training = model.training
    model.eval()
    on_cpu = next(model.parameters()).device.type == "cpu"
    try:
        with torch.no_grad(), masked_attention(model) if on_cpu else nullcontext():
            yield
    finally:
        model.train(was_training)


def _decoder(model: Any) -> Any:
    """Return the submodule of a causal LM that outputs the last hidden state."""
    decoder = model.base_model
    return decoder if decoder is not model else getattr(model, "model", None) or model.get_decoder()
