"""How a role's devices are shared out among the dimensions of its split, in the words of messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.mesh.spec import RoleSpec, RolloutSpec


def quotient(spec: RoleSpec, num_devices: int) -> str:
    """How the data-parallel degree is reckoned, for messages."""
    tp, pp, cp = spec.tensor_parallel_size, spec.pipeline_parallel_size, spec.context_parallel_size
    size = f"tensor_parallel_size {tp}"
    if not isinstance(spec, RolloutSpec):
        context = f" x context_parallel_size {cp}" if cp > 1 else ""
        size = f"({size} x pipeline_parallel_size {pp}{context})"
    return f"{num_devices} device{'' if num_devices == 1 else 's'} / {size}"


def uneven_copies(spec: RoleSpec, num_devices: int) -> Iterator[tuple[str, str]]:
    """(key under `parallelism`, what is wrong with it) of a role that is trained or frozen, where copies of its model
    cannot be spread over so many devices as it says.
    """
    cp = spec.context_parallel_size
    dp = num_devices // spec.ranks_per_row * cp  # context-parallel ranks share parameters out like data-parallel ones
    fsdp, size = spec.parallelism.fsdp, spec.parallelism.fsdp_size
    if not fsdp and cp > 1:
        yield (
            "fsdp",
            f"false needs context_parallel_size 1, where it is {cp}: ranks that share rows out share parameters out, "
            "too; set fsdp: true (with fsdp_size: 1 each of them holds a copy)",
        )
    elif not fsdp and dp > 1:
        yield (
            "fsdp",
            f"false needs a data-parallel degree of 1, where {quotient(spec, num_devices)} is {dp}; set fsdp: true "
            "(with fsdp_size: 1 each data-parallel rank holds a copy), or list fewer devices",
        )
    if fsdp and size is not None and dp % size:
        yield (
            "fsdp_size",
            f"{size} does not divide {_spread(spec, num_devices, dp)}; set it to "
            f"{_either([n for n in range(1, dp + 1) if dp % n == 0])}, or take it out for one copy of the model",
        )


def _spread(spec: RoleSpec, num_devices: int, ranks: int) -> str:
    """The ranks that parameters are spread over, for messages."""
    if spec.context_parallel_size > 1:
        return f"the {ranks} ranks of data and context parallelism"
    return f"the data-parallel degree {ranks} ({quotient(spec, num_devices)})"


def _either(numbers: Sequence[int]) -> str:
    """'1, 2 or 4'"""
    words = [str(number) for number in numbers]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
