"""The sizes and constants of a Phi-MoE model, under the names that the hub's ``config.json`` uses.

    config.json  --from_dict-->  PhiMoEConfig (frozen, checked once)  --to_dict-->  config.json

Values that the published checkpoints set are never left to defaults of a library: transformers' class default for
``rope_theta``, for example, is not the checkpoints' value.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

MODEL_TYPE = "phimoe"
_DROPOUTS = ("attention_dropout", "hidden_dropout", "expert_dropout")


@dataclasses.dataclass(frozen=True)
class LongRope:
    """The ``rope_scaling`` entry of type ``longrope`` (LongRoPE, arXiv 2402.13753): one factor per rotary frequency.

    ``short_*`` serve sequences up to ``original_max_position_embeddings`` tokens, ``long_*`` longer ones.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    short_mscale: float
    long_mscale: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class PhiMoEConfig:
    """Sizes and constants of a Phi-MoE model; wrong values raise ``ValueError`` when it is made.

    Fields carry the hub's names, misnomers included: ``rms_norm_eps`` is the epsilon of a LayerNorm, and
    ``intermediate_size`` the width of one expert. ``head_dim`` is independent of ``hidden_size / num_attention_heads``.
    ``sliding_window`` counts the keys that a query sees, itself included; None means all. ``router_jitter_noise`` is
    half the relative gap within which experts share a token (see `nanopar_models.router`).

    Two fields are ours and not the hub's:

    - ``router_noise``: in training mode, sample experts and jitter the router's input, as transformers does. Off: the
      deterministic evaluation form in both modes.
    - ``original_longrope``: past the original length, use ``long_factor`` as the original code does. Off: keep
      ``short_factor``, as transformers 5.24 does.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: LongRope | None = None
    sliding_window: int | None = None
    attention_bias: bool = True
    lm_head_bias: bool = True
    rms_norm_eps: float = 1e-5
    router_jitter_noise: float = 0.01
    input_jitter_noise: float = 0.01
    router_aux_loss_coef: float = 0.0
    output_router_logits: bool = False
    num_experts_per_tok: int = 2
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    router_noise: bool = False
    original_longrope: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            _check_type(field.name, getattr(self, field.name), declared)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.num_experts_per_tok != 2:
            raise ValueError(
                f"num_experts_per_tok must be 2, the only value that sparsemixer routing defines, "
                f"got {self.num_experts_per_tok}"
            )
        if self.num_local_experts < 2:
            raise ValueError(f"num_local_experts must be at least 2, got {self.num_local_experts}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be None or at least 1, got {self.sliding_window}")
        if self.input_jitter_noise >= 1:
            raise ValueError(f"input_jitter_noise must be below 1, got {self.input_jitter_noise}")
        if self.rope_scaling is not None:
            for name in ("short_factor", "long_factor"):
                length = len(getattr(self.rope_scaling, name))
                if length != self.head_dim // 2:
                    raise ValueError(
                        f"rope_scaling.{name} needs head_dim/2 = {self.head_dim // 2} values, got {length}"
                    )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The configuration called ``name`` (``phi-tiny-moe``, ``phi-mini-moe``, ``nano``), with fields changed.

        >>> PhiMoEConfig.preset("nano", vocab_size=64).vocab_size
        64
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the contents of a ``config.json``, in the hub's form or as transformers 5 writes it.

        Keys that do not change what the model computes (``use_cache``, ``auto_map``, ...) are ignored. Another
        ``model_type``, another activation, tied embeddings, dropout, or an unknown kind of rotary scaling raise
        ``ValueError``, as do a missing key or a value of the wrong type.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a model configuration is a JSON object, got {type(values).__name__}")
        if values.get("model_type") != MODEL_TYPE:
            raise ValueError(f"model_type must be {MODEL_TYPE!r}, got {values.get('model_type')!r}")
        if values.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {values['hidden_act']!r}")
        if values.get("tie_word_embeddings", False):
            raise ValueError("tie_word_embeddings is not supported: Phi-MoE has a head of its own")
        for name in _DROPOUTS:
            if values.get(name):
                raise ValueError(f"{name} is not supported, set it to 0 (got {values[name]!r})")
        fields = {field.name for field in dataclasses.fields(cls)}
        chosen = {name: value for name, value in values.items() if name in fields}
        chosen.update(_read_rope(values))
        if chosen.get("head_dim") is None and chosen.get("num_attention_heads"):
            _check_type("hidden_size", chosen.get("hidden_size"), "int")
            _check_type("num_attention_heads", chosen["num_attention_heads"], "int")
            chosen["head_dim"] = chosen["hidden_size"] // chosen["num_attention_heads"]
        if isinstance(chosen.get("eos_token_id"), list):
            chosen["eos_token_id"] = tuple(chosen["eos_token_id"])
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [name for name in (*required, *_REQUIRED_IN_FILES) if name not in chosen]
        if missing:
            raise ValueError(f"the model configuration lacks {', '.join(missing)}")
        return cls(**chosen)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a ``config.json`` in the hub's form; `from_dict` and transformers read it back.

        ``router_noise`` and ``original_longrope`` are written only where they are on.
        """
        values: dict[str, Any] = {
            "architectures": ["PhimoeForCausalLM"],
            "model_type": MODEL_TYPE,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
        }
        values.update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        if self.rope_scaling is not None:
            scaling = dataclasses.asdict(self.rope_scaling)
            values["rope_scaling"] = {"type": "longrope", **scaling}
            values["original_max_position_embeddings"] = self.rope_scaling.original_max_position_embeddings
        for name in ("router_noise", "original_longrope"):
            if not values[name]:
                del values[name]
        return values


# Files always state these; a file without them was written for another default than ours.
_REQUIRED_IN_FILES = ("rope_theta", "attention_bias", "lm_head_bias", "rms_norm_eps", "router_jitter_noise")
_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
)
_NOT_NEGATIVE = ("router_jitter_noise", "input_jitter_noise", "router_aux_loss_coef", "initializer_range")


def _check_type(name: str, value: object, declared: str) -> None:
    """Raise ``ValueError`` where ``value`` is not of the ``declared`` type (bool is no int; floats are finite)."""
    optional = "None" in declared
    if value is None and optional:
        return
    if "LongRope" in declared:
        fits = isinstance(value, LongRope)
    elif declared.startswith("bool"):
        fits = isinstance(value, bool)
    elif declared.startswith("float"):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    elif "tuple" in declared and isinstance(value, tuple):
        fits = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits:
        raise ValueError(f"{name} must be {declared}, got {value!r}")


def _read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` from the hub's keys or from transformers 5's ``rope_parameters``."""
    parameters = values.get("rope_parameters")
    scaling = values.get("rope_scaling")
    for name, entry in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if entry is not None and not isinstance(entry, Mapping):
            raise ValueError(f"{name} must be an object or null, got {entry!r}")
    merged = {**(scaling or {}), **(parameters or {})}
    read: dict[str, Any] = {"rope_scaling": None}
    theta = merged.get("rope_theta", values.get("rope_theta"))
    if theta is not None:
        read["rope_theta"] = theta
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind == "default":
        return read
    if kind != "longrope":
        raise ValueError(f"rope_scaling of type {kind!r} is not supported; known: default, longrope")
    original = merged.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    found = {**merged, "original_max_position_embeddings": original}
    read["rope_scaling"] = _read_longrope(found)
    return read


def _read_longrope(values: Mapping[str, Any]) -> LongRope:
    for name in ("short_factor", "long_factor"):
        factors = values.get(name)
        if not isinstance(factors, list | tuple) or not factors:
            raise ValueError(f"rope_scaling.{name} must be a list of numbers, got {factors!r}")
        for factor in factors:
            _check_type(f"rope_scaling.{name}", factor, "float")
    for name in ("short_mscale", "long_mscale"):
        _check_type(f"rope_scaling.{name}", values.get(name), "float")
    _check_type("original_max_position_embeddings", values.get("original_max_position_embeddings"), "int")
    return LongRope(
        short_factor=tuple(values["short_factor"]),
        long_factor=tuple(values["long_factor"]),
        short_mscale=values["short_mscale"],
        long_mscale=values["long_mscale"],
        original_max_position_embeddings=values["original_max_position_embeddings"],
    )


_PHI = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "num_local_experts": 16,
    "max_position_embeddings": 4096,
    "sliding_window": 2047,
    "bos_token_id": 1,
    "eos_token_id": 32000,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Sizes of the published Phi-tiny-MoE-instruct (SlimMoE, arXiv 2506.18349): 3.8 B parameters.
    "phi-tiny-moe": {**_PHI, "intermediate_size": 448, "num_attention_heads": 16, "num_key_value_heads": 4},
    # Sizes of the published Phi-mini-MoE-instruct: 7.6 B parameters.
    "phi-mini-moe": {**_PHI, "intermediate_size": 960, "num_attention_heads": 32, "num_key_value_heads": 8},
    # Learns grade-school sums on a laptop; every size is a multiple of 16, so that grouped_mm serves it.
    "nano": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "max_position_embeddings": 1024,
    },
}
