"""Text generation: greedy or sampled, batched with left padding, with a key/value cache.

    input_ids   _ _ a b c | d e <stop> pad         each row stops by itself; the batch ends with its last row
    (left pad)  f g h i j | k l m      <stop>
                prompt      new tokens -> returned

Shapes: B batch, S prompt length, n new tokens, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from nanopar_models.cache import KVCache
from nanopar_models.phi_moe import PhiMoE

NextLogits = Callable[[Tensor, Tensor, Tensor, KVCache], Tensor]


@torch.no_grad()
def generate(
    model: PhiMoE,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], None] | None = None,
    next_logits: NextLogits | None = None,
    is_over: Callable[[bool], bool] = bool,
) -> Tensor:
    """New tokens ``[B, n]``, n <= ``max_new_tokens``, after the prompts ``input_ids`` ``[B, S]``.

    ``attention_mask`` ``[B, S]`` is 0 on the padding, which must be on the left. A row ends with the first of
    ``stop_ids`` that it produces, and is filled with ``pad_id`` from there; generation ends when all rows have.
    ``temperature`` 0 takes the likeliest token; otherwise tokens are sampled (from the ``top_k`` likeliest, then from
    the likeliest whose probabilities reach ``top_p``), with ``generator`` if given. ``on_token`` receives each step's
    tokens ``[B]``. The model is put in evaluation mode meanwhile.

    Where several ranks share the work: ``next_logits(tokens [B, s], positions [B, s], mask [B, past + s], cache)`` runs
    the model on further tokens and gives the last one's logits ``[B, V]``; ``is_over`` learns after every token whether
    all rows have ended, and says whether to stop.
    """
    batch, length = input_ids.shape
    _check(input_ids, attention_mask, max_new_tokens, temperature, top_k, top_p)
    device = input_ids.device
    mask = torch.ones(batch, length, dtype=torch.int64) if attention_mask is None else attention_mask.cpu().long()
    stops = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    tokens = input_ids
    cache = KVCache(length + max_new_tokens)
    limit = model.config.rope_scaling.original_max_position_embeddings if model.config.rope_scaling else None
    with _evaluating(model):
        for _ in range(max_new_tokens):
            if limit is not None and cache.length <= limit < tokens.shape[1]:
                cache = KVCache(length + max_new_tokens)  # LongRoPE turns the past differently from here on
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, cache.length :].to(device)
            logits = (next_logits or _run(model))(tokens[:, cache.length :], positions, mask, cache)
            chosen = choose_token(logits, temperature, top_k, top_p, generator).masked_fill(finished, pad_id)
            tokens = torch.cat((tokens, chosen[:, None]), 1)
            finished = finished | torch.isin(chosen, stops)
            # A finished row goes on as padding: its tokens visit no expert.
            mask = torch.cat((mask, (~finished).long().cpu()[:, None]), 1)
            if on_token is not None:
                on_token(chosen)
            if is_over(bool(finished.all())):
                break
    return tokens[:, length:]


def _run(model: PhiMoE) -> NextLogits:
    def next_logits(tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache) -> Tensor:
        hidden = model.model(tokens, positions, mask, cache=cache)
        logits: Tensor = model.lm_head(hidden[:, -1:])[:, 0]
        return logits

    return next_logits


def _check(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if input_ids.shape[1] == 0:
        raise ValueError("each prompt needs at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be None or at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be None or in (0, 1], got {top_p}")
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must be {list(input_ids.shape)} like input_ids, got {list(attention_mask.shape)}"
            )
        if not bool((attention_mask[:, -1] == 1).all()):
            raise ValueError("generation needs padding on the left: attention_mask must end in 1 in every row")


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode again after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def choose_token(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """The next token of each row, ``[B]``."""
    if temperature == 0:
        return logits_BV.argmax(1)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None and top_k < logits_BV.shape[1]:
        smallest_B1 = logits_BV.topk(top_k, 1)[0][:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    p_BV = logits_BV.softmax(1)
    if top_p is not None and top_p < 1:
        sorted_BV, order_BV = p_BV.sort(1, descending=True)
        # A token stays while those before it have not yet reached top_p; the likeliest always does.
        beyond_BV = sorted_BV.cumsum(1) - sorted_BV >= top_p
        p_BV = torch.zeros_like(p_BV).scatter(1, order_BV, sorted_BV.masked_fill(beyond_BV, 0.0))
    return torch.multinomial(p_BV, 1, generator=generator)[:, 0]
