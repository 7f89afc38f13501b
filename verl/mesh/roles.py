"""What stands under each role of a mesh: keys, types, devices, degrees. Problems are collected, never raised."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from verl.mesh.degrees import quotient, uneven_copies
from verl.mesh.devices import is_all, read_devices
from verl.mesh.document import Node, shorten
from verl.mesh.engine_kwargs import REPLICAS, read_engine_kwargs
from verl.mesh.spec import ROLES, HybridEngine, Parallelism, RoleSpec, RolloutSpec

DTYPES = ("bfloat16", "float16", "float32")
BACKENDS = ("vllm", "torch", "auto")

_TRAINING_KEYS = ("devices", "parallelism", "dtype", "hybrid_engine")
_ROLLOUT_KEYS = (
    "devices",
    "backend",
    "tensor_parallel_size",
    "max_num_seqs",
    "enable_prefix_caching",
    "dtype",
    "engine_kwargs",
)
_ROLE_KEYS = {
    "actor": _TRAINING_KEYS,
    "critic": _TRAINING_KEYS,
    "reference": _TRAINING_KEYS,
    "reward": _TRAINING_KEYS,
    "rollout": _ROLLOUT_KEYS,
}
_PARALLELISM_KEYS = (
    "fsdp",
    "fsdp_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "virtual_stages",
    "hybrid_engine",
)
_LEARNING_KEYS = ("activation_checkpointing", "offload_activations", "offload_parameters", "offload_optimizer")
_HYBRID_KEYS = {
    "actor": ("enable", *_LEARNING_KEYS),
    "critic": _LEARNING_KEYS,
    "reference": ("offload_parameters",),
    "reward": ("offload_parameters",),
}
_TRAINING_HINTS = {
    "fsdp": "write it under parallelism",
    "fsdp_size": "write it under parallelism",
    "tensor_parallel_size": "write it under parallelism",
    "pipeline_parallel_size": "write it under parallelism",
    "context_parallel_size": "write it under parallelism",
}
_ROLLOUT_HINTS = {
    "parallelism": "write tensor_parallel_size directly under rollout",
    "pipeline_parallel_size": REPLICAS,
    "context_parallel_size": "take it out: an engine has a sequence whole on each of its devices",
    "data_parallel_size": REPLICAS,
    "hybrid_engine": "write it under actor",
}
_PARALLELISM_HINTS = {
    "data_parallel_size": "take it out: it is devices / (tensor_parallel_size x pipeline_parallel_size)",
    "ulysses_sequence_parallel_size": "write context_parallel_size",
}
_HYBRID_HINTS = dict.fromkeys(_LEARNING_KEYS, "only actor and critic learn and take it") | {
    "enable": "only the actor's weights are resharded for the rollout"
}

_LARGEST_NUMBER = 1_000_000


def read_roles(root: Node, source: str, problems: list[str]) -> dict[str, RoleSpec]:
    """The roles of a mesh, in the order of ROLES; what is wrong is appended to `problems`."""
    if root.value is None or root.value == {}:
        problems.append(f"{source}: the mesh is empty; name at least actor and rollout with their devices")
        return {}
    if not isinstance(root.value, dict):
        problems.append(f"{root.place}: a mesh maps each role to its devices, and this is {root}")
        return {}
    reader = _Reader(problems)
    if list(root.value) == ["device_mesh"]:
        reader.complain(root.value["device_mesh"], "device_mesh", "take this line out: the file itself is the mesh")
        return {}
    for key, node in root.value.items():
        if key not in ROLES:
            reader.complain(node, key, f"unknown role{nearest(key, ROLES)} (roles: {', '.join(ROLES)})")
    for role in ("actor", "rollout"):
        if role not in root.value:
            problems.append(f"{source}: no {role}; every mesh names actor and rollout with their devices")
    named = {role: root.value[role] for role in ROLES if role in root.value}
    roles = {
        role: reader.rollout(node) if role == "rollout" else reader.trained(role, node) for role, node in named.items()
    }
    reader.one_spelling(roles, named)
    reader.one_name_a_node(roles, named)
    return roles


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean "x"?' for a name that resembles a known one, else an empty string."""
    match = difflib.get_close_matches(shorten(name), list(known), n=1, cutoff=0.5)
    return f'; did you mean "{match[0]}"?' if match else ""


class _Reader:
    """Takes values out of nodes. What cannot be read is complained of once and replaced by a harmless value."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def complain(self, node: Node, path: str, what: str) -> None:
        self._problems.append(f"{node.place}: {shorten(path)}: {what}")

    def trained(self, role: str, node: Node) -> RoleSpec:
        """actor, critic, reference or reward."""
        entries = self._mapping(node, role, _ROLE_KEYS[role], _TRAINING_HINTS)
        devices = read_devices(node, entries, role, self.complain)
        below = entries.get("parallelism")
        path = f"{role}.parallelism"
        degrees = {} if below is None else self._mapping(below, path, _PARALLELISM_KEYS, _PARALLELISM_HINTS)
        parallelism = Parallelism(
            fsdp=self._flag(degrees, "fsdp", path, Parallelism.fsdp),
            fsdp_size=self._count(degrees, "fsdp_size", path, 0) or None,
            tensor_parallel_size=self._count(degrees, "tensor_parallel_size", path, 1),
            pipeline_parallel_size=self._count(degrees, "pipeline_parallel_size", path, 1),
            context_parallel_size=self._count(degrees, "context_parallel_size", path, 1),
            virtual_stages=self._count(degrees, "virtual_stages", path, 1),
        )
        if parallelism.virtual_stages > 1 and parallelism.pipeline_parallel_size == 1:
            self.complain(
                degrees["virtual_stages"],
                f"{path}.virtual_stages",
                f"{parallelism.virtual_stages} parts of each pipeline stage, and there is one stage; set "
                "pipeline_parallel_size to 2 or more, or take virtual_stages out",
            )
        if parallelism.fsdp_size is not None and not parallelism.fsdp:
            self.complain(
                degrees["fsdp_size"],
                f"{path}.fsdp_size",
                f"a copy of the model is to be spread over {parallelism.fsdp_size}, and fsdp: false spreads nothing; "
                "set fsdp: true, or take fsdp_size out",
            )
        spec = RoleSpec(
            devices,
            parallelism,
            self._choice(entries, "dtype", role, DTYPES, None),
            self._hybrid_engine(role, entries, degrees),
            everywhere=is_all(entries),
        )
        if self._check_degrees(spec, role, node):
            for key, what in uneven_copies(spec, len(devices)):
                self.complain(degrees[key], f"{path}.{key}", what)
        return spec

    def rollout(self, node: Node) -> RolloutSpec:
        entries = self._mapping(node, "rollout", _ROLE_KEYS["rollout"], _ROLLOUT_HINTS)
        tensor_parallel_size = self._count(entries, "tensor_parallel_size", "rollout", 1)
        spec = RolloutSpec(
            devices=read_devices(node, entries, "rollout", self.complain),
            parallelism=Parallelism(fsdp=False, tensor_parallel_size=tensor_parallel_size),
            dtype=self._choice(entries, "dtype", "rollout", DTYPES, None),
            everywhere=is_all(entries),
            backend=self._choice(entries, "backend", "rollout", BACKENDS, RolloutSpec.backend) or RolloutSpec.backend,
            max_num_seqs=self._count(entries, "max_num_seqs", "rollout", RolloutSpec.max_num_seqs),
            enable_prefix_caching=self._flag(
                entries, "enable_prefix_caching", "rollout", RolloutSpec.enable_prefix_caching
            ),
            engine_kwargs=read_engine_kwargs(entries, self.complain),
        )
        self._check_degrees(spec, "rollout", node)
        return spec

    def one_spelling(self, roles: Mapping[str, RoleSpec], nodes: Mapping[str, Node]) -> None:
        """Complains where roles differ in how they name devices; one role that mixes them was complained of before."""
        uniform = {
            role: next(iter(kinds))
            for role, spec in roles.items()
            if len(kinds := {device.node is None for device in spec.devices}) == 1
        }
        for role, plain in uniform.items():
            first = next(iter(uniform))
            if plain != uniform[first]:
                one, other = ("an index alone", '"node:index"') if plain else ('"node:index"', "an index alone")
                what = f"{one}, where {first} has {other}; spell all devices one way"
                self.complain(nodes[role], f"{role}.devices", what)

    def one_name_a_node(self, roles: Mapping[str, RoleSpec], nodes: Mapping[str, Node]) -> None:
        """Complains of node1 beside NODE1, which are one machine: they would be counted, and started, as two."""
        spelled: dict[str, str] = {}
        for role, spec in roles.items():
            for node in dict.fromkeys(device.node for device in spec.devices if device.node is not None):
                first = spelled.setdefault(node.lower(), node)
                if node != first:
                    entries = nodes[role].value
                    assert isinstance(entries, dict), "it has devices"
                    what = f"{node} and {first} are one node; write {first} everywhere"
                    self.complain(entries["devices"], f"{role}.devices", what)

    def _mapping(self, node: Node, path: str, keys: Sequence[str], hints: Mapping[str, str]) -> dict[str, Node]:
        """The entries with a known key."""
        if not isinstance(node.value, dict):
            self.complain(node, path, f"needs keys and values ({', '.join(keys)}), got {node}")
            return {}
        for key, entry in node.value.items():
            if key not in keys:
                remedy = f"; {hints[key]}" if key in hints else f"{nearest(key, keys)} (keys: {', '.join(keys)})"
                self.complain(entry, f"{path}.{key}", f"unknown key{remedy}")
        return {key: entry for key, entry in node.value.items() if key in keys}

    def _flag(self, entries: Mapping[str, Node], key: str, path: str, default: bool) -> bool:
        node = entries.get(key)
        if node is None:
            return default
        if isinstance(node.value, bool):
            return node.value
        self.complain(node, f"{path}.{key}", f"needs true or false, got {node}")
        return default

    def _count(self, entries: Mapping[str, Node], key: str, path: str, default: int) -> int:
        node = entries.get(key)
        if node is None:
            return default
        if type(node.value) is int and 1 <= node.value <= _LARGEST_NUMBER:  # type(): a bool is an int
            return node.value
        self.complain(node, f"{path}.{key}", f"needs a whole number from 1 to {_LARGEST_NUMBER}, got {node}")
        return default

    def _choice(
        self, entries: Mapping[str, Node], key: str, path: str, choices: Sequence[str], default: str | None
    ) -> str | None:
        node = entries.get(key)
        if node is None:
            return default
        if isinstance(node.value, str) and node.value in choices:
            return node.value
        close = nearest(node.value, choices) if isinstance(node.value, str) else ""
        self.complain(node, f"{path}.{key}", f"needs {', '.join(choices[:-1])} or {choices[-1]}, got {node}{close}")
        return default

    def _hybrid_engine(self, role: str, entries: Mapping[str, Node], degrees: Mapping[str, Node]) -> HybridEngine:
        """`hybrid_engine`, under the role or under its parallelism."""
        if "hybrid_engine" in entries and "hybrid_engine" in degrees:
            other = degrees["hybrid_engine"]
            self.complain(
                other,
                f"{role}.parallelism.hybrid_engine",
                f"stands at {entries['hybrid_engine'].place} too, directly under {role}; keep one of them",
            )
        path = f"{role}.hybrid_engine" if "hybrid_engine" in entries else f"{role}.parallelism.hybrid_engine"
        node = entries.get("hybrid_engine", degrees.get("hybrid_engine"))
        if node is None:
            return HybridEngine()
        flags = self._mapping(node, path, _HYBRID_KEYS[role], _HYBRID_HINTS)
        return HybridEngine(
            enable=self._flag(flags, "enable", path, HybridEngine.enable),
            activation_checkpointing=self._flag(
                flags, "activation_checkpointing", path, HybridEngine.activation_checkpointing
            ),
            offload_activations=self._flag(flags, "offload_activations", path, HybridEngine.offload_activations),
            offload_parameters=self._flag(flags, "offload_parameters", path, HybridEngine.offload_parameters),
            offload_optimizer=self._flag(flags, "offload_optimizer", path, HybridEngine.offload_optimizer),
        )

    def _check_degrees(self, spec: RoleSpec, role: str, node: Node) -> bool:
        """Whether the data-parallel degree is a whole number."""
        size = spec.ranks_per_row
        if len(spec.devices) % size == 0:
            return True
        self.complain(
            node,
            role,
            f"{quotient(spec, len(spec.devices))} is not whole; "
            f"list a multiple of {size} devices, or lower the size{'s' if role != 'rollout' else ''}",
        )
        return False
