"""Shapes of models: what decides how many bytes and operations a step takes.

Sources: the models' published configurations. OPT: Zhang et al. (2022), table 1; LLaMA:
Touvron et al. (2023), table 2; Llama 3.1 and SmolLM2: their config.json on Hugging Face.
OPT's parameters are counted from the shape (12 L d² + 13 L d + (vocabulary + positions) d):
25.7, 131.4 and 349 GB in fp16, where Kwon et al. (2023), table 1, say 26, 132 and 346.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        name: by which it is asked for.
        num_layers: transformer blocks.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; fewer than query heads if they are grouped.
        head_dim: width of a head.
        num_parameters: all of them, embeddings too.
        bytes_per_value: of weights and of K/V; 2 is fp16 or bf16.
        max_len: longest sequence, in tokens.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    bytes_per_value: int = 2
    max_len: int = 2048

    @property
    def parameter_bytes(self) -> int:
        """Memory that the weights take, on all devices together."""
        return self.num_parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


def _opt(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelShape:
    vocabulary_and_positions = 50_272 + 2_050
    num_parameters = (
        12 * num_layers * hidden_size**2
        + 13 * num_layers * hidden_size
        + vocabulary_and_positions * hidden_size
    )
    head_dim = hidden_size // num_heads
    return ModelShape(name, num_layers, hidden_size, num_heads, num_heads, head_dim, num_parameters)


_SMOLLM2 = ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 134_515_008, max_len=8_192)

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _opt("opt-13b", 40, 5_120, 40),
        _opt("opt-66b", 64, 9_216, 72),
        _opt("opt-175b", 96, 12_288, 96),
        ModelShape("llama-13b", 40, 5_120, 40, 40, 128, 13_015_864_320),
        ModelShape("llama-3.1-8b", 32, 4_096, 32, 8, 128, 8_030_261_248, max_len=131_072),
        ModelShape("llama-3.1-70b", 80, 8_192, 64, 8, 128, 70_553_706_496, max_len=131_072),
        _SMOLLM2,
        replace(_SMOLLM2, name="smollm2-135m-fp32", bytes_per_value=4),
    )
}
"""Shapes by name."""
