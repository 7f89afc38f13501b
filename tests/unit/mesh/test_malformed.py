"""Malformed meshes, each with the exact message that the user sees."""

import pytest

from verl.errors import MeshError
from verl.mesh.parse import parse

GOOD = "rollout: {devices: [0]}\n"
"""Completes a mesh whose lines above are looked at."""

ROLES = "(roles: actor, critic, reference, reward, rollout)"
PARALLELISM = (
    "fsdp, fsdp_size, tensor_parallel_size, pipeline_parallel_size, context_parallel_size, virtual_stages, "
    "hybrid_engine"
)
LEARNING = "activation_checkpointing, offload_activations, offload_parameters, offload_optimizer"
ROLLOUT_KEYS = (
    "(keys: devices, backend, tensor_parallel_size, max_num_seqs, enable_prefix_caching, dtype, engine_kwargs)"
)
NUMBER = "needs a whole number from 1 to 1000000"
FORMS = 'an index (0), a range (0-3) or either of a node ("node1:0", "node1:0-3")'
DEVICE = f"write {FORMS}"
SHARD = "set fsdp: true (with fsdp_size: 1 each data-parallel rank holds a copy), or list fewer devices"
REPLICAS = "take it out: a replica of the rollout is tensor_parallel_size devices, and further devices are replicas"


def actor(body: str) -> str:
    """A mesh with these entries under the actor, from line 2 on."""
    return "actor:\n" + "".join(f"  {line}\n" for line in body.splitlines()) + GOOD


def rollout(body: str) -> str:
    return "rollout:\n" + "".join(f"  {line}\n" for line in body.splitlines()) + "actor: {devices: [0]}\n"


MALFORMED = [
    # the document
    ("", "mesh.yaml: the mesh is empty; name at least actor and rollout with their devices"),
    ("# nothing\n", "mesh.yaml: the mesh is empty; name at least actor and rollout with their devices"),
    ("{}", "mesh.yaml: the mesh is empty; name at least actor and rollout with their devices"),
    ("[0, 1]", "mesh.yaml:1: a mesh maps each role to its devices, and this is a list"),
    ("actor", 'mesh.yaml:1: a mesh maps each role to its devices, and this is "actor"'),
    (
        "actor: [0\n",
        "mesh.yaml:2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'; "
        "close the bracket, and part its entries by commas",
    ),
    (
        "actor:\n\t- 0",
        "mesh.yaml:2: not valid YAML: while scanning for the next token, found character '\\t' "
        "that cannot start any token; a tab stands where only spaces may",
    ),
    (
        "actor: {devices: [@0]}",
        "mesh.yaml:1: not valid YAML: while scanning for the next token, found character '@' that cannot start any "
        "token; put quotes around the value",
    ),
    (
        "actor:\n  devices: ['node1:0]\n",
        "mesh.yaml:3: not valid YAML: while scanning a quoted scalar, found unexpected end of stream; close the "
        "quotation mark",
    ),
    (
        actor("devices: [0]\n dtype: float32"),
        "mesh.yaml:3: not valid YAML: while parsing a block mapping, expected <block end>, but found "
        "'<block mapping start>'; begin the keys of one mapping in one column, and put a space behind each colon",
    ),
    (
        "actor:{devices: [0]}\n" + GOOD,
        "mesh.yaml:1: not valid YAML: while parsing a block mapping, expected <block end>, but found '}'; begin the "
        "keys of one mapping in one column, and put a space behind each colon",
    ),
    (
        "actor: devices: [0]\n" + GOOD,
        "mesh.yaml:1: not valid YAML: mapping values are not allowed here; begin a key on a line of its own, under its "
        "neighbours",
    ),
    (
        "actor: {devices: [0]}\nrollout\n",
        "mesh.yaml:3: not valid YAML: while scanning a simple key, could not find expected ':'; put a colon and a "
        "space behind the key",
    ),
    (
        "a: 1\n---\nb: 2",
        "mesh.yaml:2: not valid YAML: expected a single document in the stream, but found another document",
    ),
    (
        "a: 1\nb: \x07",
        "mesh.yaml:2: not valid YAML: the character U+0007 may not stand in it; take it out",
    ),
    ("[" * 200, "mesh.yaml:1: more than 100 levels of lists and mappings are not read"),
    ("a: *b", "mesh.yaml:1: not valid YAML: found undefined alias 'b'; put the anchor (&) before its first use"),
    ("a: &a [*a]", "mesh.yaml:1: this value contains itself; an alias may not stand inside its own anchor"),
    ("a: &a {<<: *a}", "mesh.yaml:1: this value contains itself; an alias may not stand inside its own anchor"),
    (actor("devices: [0]\ndevices: [1]"), "mesh.yaml:3: devices: stands twice, first at mesh.yaml:2; keep one of them"),
    (actor("devices: !!python/tuple [0]"), "mesh.yaml:2: the tag python/tuple is not read; write the value alone"),
    (actor("devices: [!!int '0']"), "mesh.yaml:2: the tag int is not read; write the value alone"),
    ("<<: 3\n" + actor("devices: [0]"), "mesh.yaml:1: << merges mappings, not 3"),
    ("? [a]\n: 1\n" + actor("devices: [0]"), "mesh.yaml:1: a key must be a name, not a list or a mapping"),
    # roles
    (
        actor("devices: [0]") + "critc: {devices: [0]}",
        f'mesh.yaml:4: critc: unknown role; did you mean "critic"? {ROLES}',
    ),
    (
        actor("devices: [0]") + "ref: {devices: [0]}",
        f'mesh.yaml:4: ref: unknown role; did you mean "reference"? {ROLES}',
    ),
    (
        "device_mesh:\n  actor: {devices: [0]}\n  rollout: {devices: [0]}\n",
        "mesh.yaml:1: device_mesh: take this line out: the file itself is the mesh",
    ),
    (actor("devices: [0]") + "1: {devices: [0]}", f"mesh.yaml:4: 1: unknown role {ROLES}"),
    ("actor: {devices: [0]}", "mesh.yaml: no rollout; every mesh names actor and rollout with their devices"),
    (GOOD, "mesh.yaml: no actor; every mesh names actor and rollout with their devices"),
    (
        "actor: [0, 1]\n" + GOOD,
        "mesh.yaml:1: actor: needs keys and values (devices, parallelism, dtype, hybrid_engine), got a list",
    ),
    (
        "actor:\n" + GOOD,
        "mesh.yaml:1: actor: needs keys and values (devices, parallelism, dtype, hybrid_engine), got nothing",
    ),
    # devices
    (
        actor("dtype: float32"),
        "mesh.yaml:1: actor.devices: missing; name the role's devices, for example devices: [0, 1]",
    ),
    (actor("devices: []"), "mesh.yaml:2: actor.devices: the list is empty; name at least one device, for example [0]"),
    (actor("devices: 3"), "mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got 3; write [3]"),
    (
        actor("devices: node1:0"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got "node1:0"; write ["node1:0"]',
    ),
    (actor("devices: {0: 1}"), "mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got a mapping"),
    (actor("devices:"), "mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got nothing"),
    (
        actor('devices: [0, "cuda:1"]'),
        'mesh.yaml:2: actor.devices[1]: "cuda:1" is not how a device is named here; write 1, or "node1:1" in a job of '
        "several nodes",
    ),
    (
        actor("devices:\n- cuda"),
        'mesh.yaml:3: actor.devices[0]: "cuda" is not how a device is named here; write 0, or "node1:0" in a job of '
        "several nodes",
    ),
    (actor("devices: ['2']"), 'mesh.yaml:2: actor.devices[0]: "2" is text; write 2 without quotes'),
    (actor("devices: [node1]"), f'mesh.yaml:2: actor.devices[0]: "node1" is not a device; {DEVICE}'),
    (actor("devices: ['node1:']"), f'mesh.yaml:2: actor.devices[0]: "node1:" is not a device; {DEVICE}'),
    (actor("devices: [':0']"), f'mesh.yaml:2: actor.devices[0]: ":0" is not a device; {DEVICE}'),
    (actor("devices: ['a:0:1']"), f'mesh.yaml:2: actor.devices[0]: "a:0:1" is not a device; {DEVICE}'),
    (
        actor("devices: [010]"),  # eight, to YAML 1.1
        "mesh.yaml:2: actor.devices[0]: 010 is the number 8 in YAML; write it so, or without the zero",
    ),
    (
        actor("devices: [0, 0x3]"),
        "mesh.yaml:2: actor.devices[1]: 0x3 is the number 3 in YAML; write it so, or without the zero",
    ),
    (actor("devices: [-1]"), "mesh.yaml:2: actor.devices[0]: needs an index from 0 to 999999, got -1"),
    (actor("devices: [1.0]"), f"mesh.yaml:2: actor.devices[0]: needs {FORMS}, got 1.0"),
    (
        actor("devices: [true]"),
        f"mesh.yaml:2: actor.devices[0]: needs {FORMS}, got true",
    ),
    (
        actor("devices: [[0]]"),
        f"mesh.yaml:2: actor.devices[0]: needs {FORMS}, got a list",
    ),
    (
        actor("devices: [null]"),
        f"mesh.yaml:2: actor.devices[0]: needs {FORMS}, got nothing",
    ),
    (actor("devices: [1, 0, 1]"), "mesh.yaml:2: actor.devices[2]: 1 stands at [0] too; name it once"),
    (
        "actor: {devices: ['a:0', 'a:0']}\nrollout: {devices: ['a:0']}",
        "mesh.yaml:1: actor.devices[1]: a:0 stands at [0] too; name it once",
    ),
    (
        actor("devices: [0, 'node1:1']"),
        'mesh.yaml:2: actor.devices: mixes an index alone with "node:index"; spell all devices one way',
    ),
    (
        actor("devices: ['node1:0']"),
        'mesh.yaml:3: rollout.devices: an index alone, where actor has "node:index"; spell all devices one way',
    ),
    (
        "actor: {devices: ['node1:0', 'NODE1:1']}\nrollout: {devices: ['node1:0']}",
        "mesh.yaml:1: actor.devices: NODE1 and node1 are one node; write node1 everywhere",
    ),
    (
        "actor: {devices: ['node1:0', 'node2:0']}\nrollout: {devices: ['Node2:1']}",
        "mesh.yaml:2: rollout.devices: Node2 and node2 are one node; write node2 everywhere",
    ),
    # a slice of Python's
    (
        "actor: {devices: [0:4]}\nrollout: {devices: all}",
        """\
mesh.yaml:1: actor.devices[0]: "0:4" is not read, since it could be a range or device 4 of a node 0; write 0-3 for \
what it is in Python, 0-4 for a range with 4 in it, or call the node by a name with a letter (VERL_NODE_NAME, or \
node0, node1, ...)""",
    ),
    (
        actor("devices: [1:2, 'node1:0']"),
        """\
mesh.yaml:2: actor.devices[0]: "1:2" is not read, since it could be a range or device 2 of a node 1; write 1 for what \
it is in Python, 1-2 for a range with 2 in it, or call the node by a name with a letter (VERL_NODE_NAME, or node0, \
node1, ...)""",
    ),
    (
        "actor:\n  dtype: float32\n  devices: ['a:0', 'A:1']\nrollout: {devices: ['a:0']}",
        "mesh.yaml:3: actor.devices: A and a are one node; write a everywhere",
    ),
    # ranges and the whole job
    (
        actor("devices: 0-3"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got "0-3"; write ["0-3"]',
    ),
    (
        actor("devices: node1:0-3"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got "node1:0-3"; write ["node1:0-3"]',
    ),
    (
        actor("devices: 0, 1"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got "0, 1"; write [0, 1]',
    ),
    (
        actor("devices: ALL"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got "ALL"; write all',
    ),
    (
        actor("devices: auto"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], or all, got "auto"; write all for every device '
        "of the job, or list them",
    ),
    (
        actor("devices: [all]"),
        'mesh.yaml:2: actor.devices[0]: "all" is the whole job; write devices: all, without a list',
    ),
    (
        actor("devices: [0-3, 2-5]"),
        'mesh.yaml:2: actor.devices[1]: "2-5" names 2, 3, which [0] names too; name each device once',
    ),
    (
        actor("devices:\n- 0-3\n- 8\n- 4-20"),
        'mesh.yaml:5: actor.devices[2]: "4-20" names 8, which [1] names too; name each device once',
    ),
    (
        actor("devices: [0-19, 0-19]"),
        'mesh.yaml:2: actor.devices[1]: "0-19" names 0, 1, 2, 3, 4, 5, 6, 7 and 12 more, which [0] names too; name '
        "each device once",
    ),
    (actor("devices: [0-3, 2]"), "mesh.yaml:2: actor.devices[1]: 2 stands at [0] too; name it once"),
    (
        "actor: {devices: ['a:0-1', 'b:0-1', 'a:1-2']}\nrollout: {devices: ['a:0']}",
        'mesh.yaml:1: actor.devices[2]: "a:1-2" names a:1, which [0] names too; name each device once',
    ),
    (
        actor("devices: [3-0]"),
        'mesh.yaml:2: actor.devices[0]: "3-0" runs backwards; write 0-3, or list the devices one by one in that order',
    ),
    (
        actor("devices: ['node1:3-0']"),
        'mesh.yaml:2: actor.devices[0]: "node1:3-0" runs backwards; write node1:0-3, or list the devices one by one in '
        "that order",
    ),
    (
        actor("devices: ['cuda:0-3']"),
        'mesh.yaml:2: actor.devices[0]: "cuda:0-3" is not how a device is named here; write 0-3, or "node1:0-3" in a '
        "job of several nodes",
    ),
    (actor("devices: ['08']"), 'mesh.yaml:2: actor.devices[0]: "08" is text; write 8 without quotes'),
    (actor("devices: ['0-3-5']"), f'mesh.yaml:2: actor.devices[0]: "0-3-5" is not a device; {DEVICE}'),
    (actor("devices: [0 - 3]"), f'mesh.yaml:2: actor.devices[0]: "0 - 3" is not a device; {DEVICE}'),
    (actor("devices: ['node1:0-']"), f'mesh.yaml:2: actor.devices[0]: "node1:0-" is not a device; {DEVICE}'),
    (actor("devices: ['node1-0']"), f'mesh.yaml:2: actor.devices[0]: "node1-0" is not a device; {DEVICE}'),
    (
        actor("devices: [0-99999]"),
        'mesh.yaml:2: actor.devices[0]: with "0-99999" the role has more than 10000 devices; list fewer',
    ),
    (
        actor("devices: [0-9999, 0-9999]"),
        'mesh.yaml:2: actor.devices[1]: with "0-9999" the role has more than 10000 devices; list fewer',
    ),
    (
        actor("devices: [0-1, 'node1:2-3']"),
        'mesh.yaml:2: actor.devices: mixes an index alone with "node:index"; spell all devices one way',
    ),
    (
        actor("devices: [0-2]\nparallelism: {tensor_parallel_size: 2}"),
        "mesh.yaml:1: actor: 3 devices / (tensor_parallel_size 2 x pipeline_parallel_size 1) is not whole; list a "
        "multiple of 2 devices, or lower the sizes",
    ),
    (
        actor("devices: [0-1]\nparallelism: {fsdp: false}"),
        "mesh.yaml:3: actor.parallelism.fsdp: false needs a data-parallel degree of 1, where 2 devices / "
        f"(tensor_parallel_size 1 x pipeline_parallel_size 1) is 2; {SHARD}",
    ),
    # keys, types and degrees
    (
        actor("devices: [0]\nparalelism: {}"),
        'mesh.yaml:3: actor.paralelism: unknown key; did you mean "parallelism"? (keys: devices, '
        "parallelism, dtype, hybrid_engine)",
    ),
    (
        actor("devices: [0]\ntensor_parallel_size: 1"),
        "mesh.yaml:3: actor.tensor_parallel_size: unknown key; write it under parallelism",
    ),
    (actor("devices: [0]\nfsdp: true"), "mesh.yaml:3: actor.fsdp: unknown key; write it under parallelism"),
    (
        actor("devices: [0]\nparallelism: 2"),
        f"mesh.yaml:3: actor.parallelism: needs keys and values ({PARALLELISM}), got 2",
    ),
    (
        actor("devices: [0]\nparallelism: {virtual_stages: 2}"),
        "mesh.yaml:3: actor.parallelism.virtual_stages: 2 parts of each pipeline stage, and there is one stage; set "
        "pipeline_parallel_size to 2 or more, or take virtual_stages out",
    ),
    (
        actor("devices: [0]\nparallelism: {data_parallel_size: 1}"),
        "mesh.yaml:3: actor.parallelism.data_parallel_size: unknown key; take it out: it is devices / "
        "(tensor_parallel_size x pipeline_parallel_size)",
    ),
    (
        actor("devices: [0]\nparallelism: {fsdp: maybe}"),
        'mesh.yaml:3: actor.parallelism.fsdp: needs true or false, got "maybe"',
    ),
    (actor("devices: [0]\nparallelism: {fsdp: 1}"), "mesh.yaml:3: actor.parallelism.fsdp: needs true or false, got 1"),
    (
        actor("devices: [0]\nparallelism: {tensor_parallel_size: 0}"),
        f"mesh.yaml:3: actor.parallelism.tensor_parallel_size: {NUMBER}, got 0",
    ),
    (
        actor("devices: [0]\nparallelism: {tensor_parallel_size: -2}"),
        f"mesh.yaml:3: actor.parallelism.tensor_parallel_size: {NUMBER}, got -2",
    ),
    (
        actor("devices: [0]\nparallelism: {pipeline_parallel_size: 1.5}"),
        f"mesh.yaml:3: actor.parallelism.pipeline_parallel_size: {NUMBER}, got 1.5",
    ),
    (
        actor("devices: [0]\nparallelism: {pipeline_parallel_size: true}"),
        f"mesh.yaml:3: actor.parallelism.pipeline_parallel_size: {NUMBER}, got true",
    ),
    (
        actor("devices: [0]\nparallelism: {tensor_parallel_size: '2'}"),
        f'mesh.yaml:3: actor.parallelism.tensor_parallel_size: {NUMBER}, got "2"',
    ),
    (
        actor("devices: [0, 1, 2]\nparallelism: {tensor_parallel_size: 2}"),
        "mesh.yaml:1: actor: 3 devices / (tensor_parallel_size 2 x pipeline_parallel_size 1) is not whole; list a "
        "multiple of 2 devices, or lower the sizes",
    ),
    (
        actor("devices: [0, 1]\nparallelism: {tensor_parallel_size: 2, pipeline_parallel_size: 2}"),
        "mesh.yaml:1: actor: 2 devices / (tensor_parallel_size 2 x pipeline_parallel_size 2) is not whole; list a "
        "multiple of 4 devices, or lower the sizes",
    ),
    (
        actor("devices: [0, 1, 2, 3]\nparallelism:\n  tensor_parallel_size: 2\n  fsdp: false"),
        "mesh.yaml:5: actor.parallelism.fsdp: false needs a data-parallel degree of 1, where 4 devices / "
        f"(tensor_parallel_size 2 x pipeline_parallel_size 1) is 2; {SHARD}",
    ),
    (
        actor("devices: [0, 1]\ncontext_parallel_size: 2"),
        "mesh.yaml:3: actor.context_parallel_size: unknown key; write it under parallelism",
    ),
    (
        actor("devices: [0, 1]\nparallelism: {ulysses_sequence_parallel_size: 2}"),
        "mesh.yaml:3: actor.parallelism.ulysses_sequence_parallel_size: unknown key; write context_parallel_size",
    ),
    (
        actor("devices: [0, 1]\nparallelism: {context_parallel_size: 0}"),
        f"mesh.yaml:3: actor.parallelism.context_parallel_size: {NUMBER}, got 0",
    ),
    (
        actor("devices: [0-5]\nparallelism: {context_parallel_size: 4}"),
        "mesh.yaml:1: actor: 6 devices / (tensor_parallel_size 1 x pipeline_parallel_size 1 x context_parallel_size 4) "
        "is not whole; list a multiple of 4 devices, or lower the sizes",
    ),
    (
        actor("devices: [0, 1]\nparallelism:\n  context_parallel_size: 2\n  fsdp: false"),
        "mesh.yaml:5: actor.parallelism.fsdp: false needs context_parallel_size 1, where it is 2: ranks that share "
        "rows out share parameters out, too; set fsdp: true (with fsdp_size: 1 each of them holds a copy)",
    ),
    (
        actor("devices: [0-3]\nparallelism: {context_parallel_size: 2, fsdp_size: 3}"),
        "mesh.yaml:3: actor.parallelism.fsdp_size: 3 does not divide the 4 ranks of data and context parallelism; set "
        "it to 1, 2 or 4, or take it out for one copy of the model",
    ),
    (
        rollout("devices: [0, 1]\ncontext_parallel_size: 2"),
        "mesh.yaml:3: rollout.context_parallel_size: unknown key; take it out: an engine has a sequence whole on each "
        "of its devices",
    ),
    (
        actor("devices: [0-4]\nparallelism: {tensor_parallel_size: 2, fsdp: false}"),
        "mesh.yaml:1: actor: 5 devices / (tensor_parallel_size 2 x pipeline_parallel_size 1) is not whole; list a "
        "multiple of 2 devices, or lower the sizes",
    ),
    (
        actor("devices: [0-15]\nparallelism:\n  tensor_parallel_size: 2\n  fsdp_size: 3"),
        "mesh.yaml:5: actor.parallelism.fsdp_size: 3 does not divide the data-parallel degree 8 (16 devices / "
        "(tensor_parallel_size 2 x pipeline_parallel_size 1)); set it to 1, 2, 4 or 8, or take it out for one copy of "
        "the model",
    ),
    (
        actor("devices: [0]\nparallelism: {fsdp_size: 2}"),
        "mesh.yaml:3: actor.parallelism.fsdp_size: 2 does not divide the data-parallel degree 1 (1 device / "
        "(tensor_parallel_size 1 x pipeline_parallel_size 1)); set it to 1, or take it out for one copy of the model",
    ),
    (
        actor("devices: [0]\nparallelism: {fsdp: false, fsdp_size: 2}"),
        "mesh.yaml:3: actor.parallelism.fsdp_size: a copy of the model is to be spread over 2, and fsdp: false spreads "
        "nothing; set fsdp: true, or take fsdp_size out",
    ),
    (
        actor("devices: [0-1]\nparallelism: {fsdp_size: 0}"),
        f"mesh.yaml:3: actor.parallelism.fsdp_size: {NUMBER}, got 0",
    ),
    (
        actor("devices: [0-1]\nparallelism: {fsdp_size: -1}"),
        f"mesh.yaml:3: actor.parallelism.fsdp_size: {NUMBER}, got -1",
    ),
    (actor("devices: [0-1]\nfsdp_size: 2"), "mesh.yaml:3: actor.fsdp_size: unknown key; write it under parallelism"),
    (
        actor("devices: [0]\ndtype: bf16"),
        'mesh.yaml:3: actor.dtype: needs bfloat16, float16 or float32, got "bf16"; did you mean "bfloat16"?',
    ),
    (actor("devices: [0]\ndtype: 16"), "mesh.yaml:3: actor.dtype: needs bfloat16, float16 or float32, got 16"),
    # hybrid engine
    (
        actor("devices: [0]\nhybrid_engine: true"),
        f"mesh.yaml:3: actor.hybrid_engine: needs keys and values (enable, {LEARNING}), got true",
    ),
    (
        actor("devices: [0]\nhybrid_engine: {enabled: true}"),
        f'mesh.yaml:3: actor.hybrid_engine.enabled: unknown key; did you mean "enable"? (keys: enable, {LEARNING})',
    ),
    (
        actor("devices: [0]\nhybrid_engine: {enable: true}\nparallelism: {hybrid_engine: {enable: true}}"),
        "mesh.yaml:4: actor.parallelism.hybrid_engine: stands at mesh.yaml:3 too, directly under "
        "actor; keep one of them",
    ),
    (
        actor("devices: [0]") + "critic: {devices: [0], hybrid_engine: {enable: true}}",
        "mesh.yaml:4: critic.hybrid_engine.enable: unknown key; only the actor's weights are resharded for the rollout",
    ),
    (
        actor("devices: [0]") + "reward: {devices: [0], hybrid_engine: {offload_optimizer: true}}",
        "mesh.yaml:4: reward.hybrid_engine.offload_optimizer: unknown key; only actor and critic learn and take it",
    ),
    (
        actor("devices: [0]") + "reference: {devices: [0], hybrid_engine: {offload: true}}",
        'mesh.yaml:4: reference.hybrid_engine.offload: unknown key; did you mean "offload_parameters"? (keys: '
        "offload_parameters)",
    ),
    (
        actor("devices: [0]\nhybrid_engine: {offload_parameters: cpu}"),
        'mesh.yaml:3: actor.hybrid_engine.offload_parameters: needs true or false, got "cpu"',
    ),
    # rollout
    (
        rollout("devices: [0]\nbackend: vlm"),
        'mesh.yaml:3: rollout.backend: needs vllm, torch or auto, got "vlm"; did you mean "vllm"?',
    ),
    (rollout("devices: [0]\nbackend: off"), "mesh.yaml:3: rollout.backend: needs vllm, torch or auto, got off"),
    (rollout("devices: [0]\nmax_num_seqs: 0"), f"mesh.yaml:3: rollout.max_num_seqs: {NUMBER}, got 0"),
    (
        rollout("devices: [0]\nenable_prefix_caching: sure"),
        'mesh.yaml:3: rollout.enable_prefix_caching: needs true or false, got "sure"',
    ),
    (
        rollout("devices: [0]\nparallelism: {}"),
        "mesh.yaml:3: rollout.parallelism: unknown key; write tensor_parallel_size directly under rollout",
    ),
    (
        rollout("devices: [0]\npipeline_parallel_size: 2"),
        f"mesh.yaml:3: rollout.pipeline_parallel_size: unknown key; {REPLICAS}",
    ),
    (
        rollout("devices: [0]\nmax_num_seq: 2"),
        f'mesh.yaml:3: rollout.max_num_seq: unknown key; did you mean "max_num_seqs"? {ROLLOUT_KEYS}',
    ),
    (
        rollout("devices: [0]\nhybrid_engine: {}"),
        "mesh.yaml:3: rollout.hybrid_engine: unknown key; write it under actor",
    ),
    (
        rollout("devices: [0]\nengine_kwargs: [1]"),
        "mesh.yaml:3: rollout.engine_kwargs: needs keys and values, got a list",
    ),
    (
        rollout("devices: [0]\nengine_kwargs: {dtype: half}"),
        "mesh.yaml:3: rollout.engine_kwargs.dtype: not here; write it directly under rollout",
    ),
    (
        rollout("devices: [0]\nengine_kwargs:\n  max_model_len: 4096"),
        "mesh.yaml:4: rollout.engine_kwargs.max_model_len: not here; take it out: it is data.max_prompt_length + "
        "data.max_response_length",
    ),
    (
        rollout("devices: [0]\nengine_kwargs: {enable_sleep_mode: false}"),
        "mesh.yaml:3: rollout.engine_kwargs.enable_sleep_mode: not here; take it out: verl sets it",
    ),
    *(
        (
            rollout(f"devices: [0]\nengine_kwargs: {{kv_cache_memory_bytes: {value}}}"),
            "mesh.yaml:3: rollout.engine_kwargs.kv_cache_memory_bytes: needs a whole number of bytes, such as "
            f"12884901888 (12 GiB), got {told}",
        )
        for value, told in (("12GiB", '"12GiB"'), ("12e9", "12e9"), ("-5", "-5"), ("", "nothing"), ("true", "true"))
    ),
    *(
        (
            rollout(f"devices: [0]\nengine_kwargs: {{gpu_memory_utilization: {value}}}"),
            "mesh.yaml:3: rollout.engine_kwargs.gpu_memory_utilization: needs a part of the device's memory, such as "
            f"0.9, got {told}",
        )
        for value, told in (("90", "90"), ("0", "0"), ("90%", '"90%"'), (".nan", ".nan"))
    ),
    (
        rollout("devices: [0]\nengine_kwargs: {data_parallel_size: 2}"),
        f"mesh.yaml:3: rollout.engine_kwargs.data_parallel_size: not here; {REPLICAS}",
    ),
    (
        rollout("devices: [0, 1, 2]\ntensor_parallel_size: 2"),
        "mesh.yaml:1: rollout: 3 devices / tensor_parallel_size 2 is not whole; list a multiple of 2 devices, or lower "
        "the size",
    ),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_malformed_mesh(text: str, message: str):
    with pytest.raises(MeshError) as caught:
        parse(text, "mesh.yaml")
    assert len(caught.value.problems) == 1
    assert str(caught.value) == message
