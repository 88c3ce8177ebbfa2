"""Named shapes: what a rank holds. Every benchmark takes its sizes from here."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Spec:
    """T tokens per rank of H elements, K of E experts each."""

    tokens: int
    hidden: int
    top_k: int
    num_experts: int
    dtype: str = "float32"
    capacity_factor: float | None = 1.25
    expert_hidden: int = 0  # inner size of an expert's FFN, where a whole layer is measured


SPECS = {
    # The shape that the speed targets are stated for.
    "train": Spec(tokens=1024, hidden=2048, top_k=4, num_experts=32),
    "decode": Spec(tokens=8, hidden=1024, top_k=2, num_experts=8, capacity_factor=None),
    # Published expert layouts, as GPU benchmarks use them; tokens per rank are given by the run.
    "deepseek-v3": Spec(
        tokens=4096, hidden=7168, top_k=8, num_experts=256, dtype="bfloat16", expert_hidden=2048
    ),
    "qwen3-30b": Spec(
        tokens=4096, hidden=2048, top_k=8, num_experts=128, dtype="bfloat16", expert_hidden=768
    ),
    "qwen3-235b": Spec(
        tokens=4096, hidden=4096, top_k=8, num_experts=128, dtype="bfloat16", expert_hidden=1536
    ),
    # Small enough that two CPU cores compute its layer often, large enough that rows decide.
    "skew": Spec(
        tokens=1024, hidden=256, top_k=4, num_experts=64, capacity_factor=None, expert_hidden=512
    ),
    "smoke": Spec(tokens=32, hidden=64, top_k=2, num_experts=16, expert_hidden=32),
}


def machine(num_devices):
    """What a result was measured on."""
    kind = jax.devices()[0].device_kind
    return {"machine": f"{num_devices}x {kind}", "jax": jax.__version__}


def file_name_of(machine):
    """`2xh100` of "2x NVIDIA H100 80GB HBM3": the number, and the first word with a digit."""
    number, *words = machine.split()
    model = next((word for word in words if any(map(str.isdigit, word))), "".join(words))
    return (number + model).lower()
