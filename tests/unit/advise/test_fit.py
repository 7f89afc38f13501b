"""Budgets of devices, and what is said where one is too small."""

from dataclasses import replace

import pytest

from tests.support.advice import job_of, models, shape
from verl.advise import fit
from verl.advise.budget import Budget, budgets, tokens_of
from verl.advise.job import Job
from verl.advise.memory import PROCESS_BYTES, Need
from verl.advise.report import examine
from verl.config import ActorConfig, DataConfig, PPOConfig, RolloutConfig

SPLIT = """
actor: {devices: [0-1]}
critic: {devices: [2]}
reward: {devices: [2]}
rollout: {devices: [3], backend: vllm}
"""
SHARED = """actor: {devices: [0-1]}
critic: {devices: [1]}
rollout:
  devices: [0-1]
  tensor_parallel_size: 2
"""
GIB = 1 << 30


def found(text: str, device_memory: int | None = 80 * GIB, config: PPOConfig | None = None) -> tuple[Job, list[Budget]]:
    job = job_of(text)
    return job, budgets(job, models(), config or PPOConfig(), device_memory)


def test_devices_that_hold_the_same_are_one_budget():
    _, [actor, critic, rollout] = found(SPLIT)
    assert (actor.ranks, critic.ranks, rollout.ranks) == ((0, 1), (2,), (3,))
    assert set(actor.needs) == {"actor", "reference"} and set(critic.needs) == {"critic"}
    assert (actor.processes, rollout.processes) == (1, 2)  # vLLM's worker is a process of its own


def test_a_peak_is_what_stays_and_the_one_turn_that_takes_most():
    _, [both, _] = found(SHARED)
    assert set(both.needs) == {"actor", "reference", "rollout"} and both.shares and both.worker == "actor"
    stays = sum(sum(need.stays.values()) for need in both.needs.values())
    turns = [sum(need.at_work.values()) for need in both.needs.values()]
    assert both.peak == stays + max(turns) + 2 * PROCESS_BYTES
    assert dict(both.terms())["CUDA and NCCL"] == 2 * PROCESS_BYTES
    assert sum(size for _, size in both.terms()) == both.peak


def test_one_shared_device_makes_all_devices_of_its_replica_shared():
    text = "actor: {devices: [0]}\nrollout: {devices: [0-3], tensor_parallel_size: 2, backend: vllm}"
    _, budgets_found = found(text)
    assert {budget.ranks: budget.shares for budget in budgets_found} == {(0,): True, (1,): True, (2, 3): False}


def test_the_torch_backend_shares_its_process():
    _, [budget, *_] = found("actor: {devices: [0]}\nrollout: {devices: [0], backend: torch}")
    assert budget.processes == 1 and not budget.shares


@pytest.mark.parametrize(
    ("transfer", "of_actor", "of_engine"), [("node_memory", {}, (0, 0)), ("ipc", {}, (2, 1)), ("nccl", {0: 2}, (0, 1))]
)
def test_buckets_of_a_load_are_on_the_devices_that_it_goes_through(transfer, of_actor, of_engine):
    """All of this model is one bucket: 2 bytes for each of its parameters."""
    attention, mlp, norms = 2 * 48 * 48 + 2 * 16 * 48, 3 * 48 * 112, 2 * 48
    whole = 2 * (2 * 320 * 48 + 3 * (attention + mlp + norms) + 48)
    _, by_ranks = found(SPLIT, config=PPOConfig(rollout=RolloutConfig(weight_transfer=transfer)))
    by_rank = {rank: budget for budget in by_ranks for rank in budget.ranks}
    for rank in (0, 1):
        sent = by_rank[rank].needs["actor"].stays.get("buckets of weights to send", 0)
        assert sent == of_actor.get(rank, 0) * whole
    engine = by_rank[3].needs["rollout"]
    assert (engine.term("buckets of weights"), engine.term("a bucket taken in")) == tuple(n * whole for n in of_engine)
    assert engine.term("weights") == whole


def test_tokens_of_a_device():
    config = PPOConfig(
        data=DataConfig(train_batch_size=32, max_prompt_length=100, max_response_length=150),
        actor=ActorConfig(ppo_mini_batch_size=8, max_tokens_per_micro_batch=1000),
        rollout=RolloutConfig(n=2),
    )
    four = tokens_of("actor", config, dp=4)  # 8 / 4 prompts x 2 x 250 tokens
    assert (four.micro_batch, four.longest, four.accumulates) == (1000, 250, False)
    two = tokens_of("actor", config, dp=2)
    assert (two.micro_batch, two.accumulates) == (1000, True)
    long = replace(config, actor=ActorConfig(ppo_mini_batch_size=8, max_tokens_per_micro_batch=100))
    assert tokens_of("actor", long, dp=2).micro_batch == 250  # raised to the longest sequence
    assert tokens_of("reference", config, dp=16).micro_batch == 1000  # 2 prompts x 2 x 250
    assert replace(two, micro_batch=-(-two.micro_batch // 3), cp=3) == tokens_of("actor", config, dp=2, cp=3)


def test_a_device_that_is_too_small():
    job, found_budgets = found(SPLIT, config=PPOConfig())
    critic = found_budgets[1]
    assert list(fit.too_large(job, [critic], critic.peak)) == []
    (message,) = fit.too_large(job, [critic], critic.peak - 1)
    assert message.startswith("mesh.yaml:3: critic.devices: 2 would need 1.0 of 1.0 GiB (CUDA and NCCL 1.0, critic ")
    assert message.endswith(
        "set critic.hybrid_engine.activation_checkpointing: true, which saves most of "
        f"{fit.gib(critic.needs['critic'].at_work['activations'])} GiB"
    )


def need(stays: float = 0, at_work: float = 0, term: str = "activations") -> Need:
    return Need({"parameters": int(stays * GIB)}, {term: int(at_work * GIB)})


def test_remedies():
    """By hand-made budgets of what is too much."""
    job = job_of(SHARED.replace("tensor_parallel_size: 2", "engine_kwargs: {kv_cache_memory_bytes: 1}"))

    def said(budget: Budget) -> str:
        (message,) = fit.too_large(job, [budget], 80 * GIB)
        return message.partition("); ")[2]

    engine = Need({}, {"weights": 10 * GIB, "KV cache": 70 * GIB})
    assert said(Budget((0,), {"actor": need(20, 5), "rollout": engine}, 2, shares=True)) == (
        f"lower rollout.engine_kwargs.kv_cache_memory_bytes to {48 * GIB} (48 GiB) or less"
    )
    assert said(Budget((0,), {"actor": need(50, 60)}, 1, shares=False)) == (
        "set actor.hybrid_engine.activation_checkpointing: true, which saves most of 60.0 GiB"
    )
    assert said(Budget((0,), {"actor": need(50, 5), "critic": need(45, 5)}, 1, shares=False)) == (
        "give actor more devices, or put it and critic on devices of their own"
    )
    assert said(Budget((0,), {"actor": need(90, 5)}, 1, shares=False)) == (
        "give actor more devices, or lower actor's max_tokens_per_micro_batch"
    )
    assert said(Budget((0,), {"rollout": need(90)}, 2, shares=False)) == (
        "raise rollout.tensor_parallel_size, so that a replica has more devices"
    )
    too_large_beside_others = Need({}, {"weights": 81 * GIB, "KV cache": GIB})
    assert said(Budget((0,), {"actor": need(20, 5), "rollout": too_large_beside_others}, 2, shares=True)) == (
        "raise rollout.tensor_parallel_size, so that a replica has more devices"
    )
    greedy = SHARED.replace("tensor_parallel_size: 2", "engine_kwargs: {gpu_memory_utilization: 0.995}")
    (message,) = fit.too_large(job_of(greedy), [Budget((0,), {"rollout": need(79)}, 2, shares=False)], 80 * GIB)
    assert message.endswith(
        "set rollout.engine_kwargs.gpu_memory_utilization to 0.98, which leaves the rank its own part"
    )


def test_a_shared_engine_is_told_how_large_its_cache_may_be():
    job, found_budgets = found(SHARED, 8 * GIB)
    (message,) = fit.unsized_cache(job, found_budgets, 8 * GIB)
    assert message == (
        "mesh.yaml:3: rollout: vLLM shares devices with other roles, so it cannot take what it finds free when it "
        f"starts; set rollout.engine_kwargs.kv_cache_memory_bytes: {5 * GIB} (5 GiB) is the most that fits"
    )
    job, found_budgets = found(SHARED + f"  engine_kwargs: {{kv_cache_memory_bytes: {5 * GIB}}}", 8 * GIB)
    assert list(fit.unsized_cache(job, found_budgets, 8 * GIB)) == []
    assert list(fit.too_large(job, found_budgets, 8 * GIB)) == []
    job, found_budgets = found(SHARED + f"  engine_kwargs: {{kv_cache_memory_bytes: {6 * GIB}}}", 8 * GIB)
    assert len(list(fit.too_large(job, found_budgets, 8 * GIB))) >= 1


def test_a_shared_engine_on_devices_of_no_known_size():
    job, found_budgets = found(SHARED, None)
    (message,) = fit.unsized_cache(job, found_budgets, None)
    assert message.endswith("kv_cache_memory_bytes (--device-memory GIB tells how much fits)")


def test_a_shared_engine_for_which_nothing_is_left():
    job, found_budgets = found(SHARED, 3 * GIB)
    (message,) = fit.unsized_cache(job, found_budgets, 3 * GIB)
    assert message.endswith("Beside the other roles nothing is left for it, so give some role more devices, too")


def test_a_cache_that_is_smaller_than_a_sequence():
    text = "actor: {devices: [0]}\nrollout: {devices: [1], engine_kwargs: {kv_cache_memory_bytes: 1000}}"
    job, found_budgets = found(text)
    (message,) = fit.small_cache(job, found_budgets, models(), PPOConfig())
    assert message == (
        "mesh.yaml:2: rollout: on 1 the key-value cache has room for 5 tokens, and one sequence has up to 1024 "
        "(data.max_prompt_length + max_response_length); raise tensor_parallel_size, or "
        "engine_kwargs.kv_cache_memory_bytes where it is set"
    )  # 2 x 3 layers x 2 heads x 8 x 2 bytes are 192 a token


def test_what_is_tight_is_a_warning():
    job, [actor, *_] = found(SPLIT)
    size = int(actor.peak / 0.95)
    (message,) = fit.tight(job, [actor], size)
    assert message.startswith("mesh.yaml: 0-1 would need ") and "which is tight" in message
    assert list(fit.tight(job, [actor], 2 * size)) == []


@pytest.mark.parametrize(
    ("nodes", "warning"),
    [
        (
            "6",
            "mesh.yaml: no role uses 4-5; the 2 processes there would only wait: add the devices to a role, or start "
            "fewer processes",
        ),
        (
            "5",
            "mesh.yaml: no role uses 4; the process there would only wait: add the device to a role, or start fewer "
            "processes",
        ),
    ],
)
def test_idle_devices_are_a_warning(nodes: str, warning: str):
    report = examine(job_of(SPLIT, nodes), {}, PPOConfig(), None, settings=False)
    assert (report.problems, report.warnings) == ((), (warning,))


def test_settings_are_held_against_the_mesh_where_they_are_meant():
    job = job_of("actor: {devices: [0-2]}\nrollout: {devices: [0]}")
    assert examine(job, {}, PPOConfig(), None, settings=False).problems == ()
    problems = examine(job, {}, PPOConfig(), None, settings=True).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=16",
        "actor.ppo_mini_batch_size=16",
    ]


def test_what_cannot_be_split_has_no_budget():
    job = job_of("actor: {devices: [0-3], parallelism: {tensor_parallel_size: 4}}\nrollout: {devices: [0]}")
    report = examine(job, {"actor": shape()}, PPOConfig(), 80 * GIB, settings=False)
    assert len(report.problems) == 1 and report.budgets == ()


# -- trainers that leave while the engine works ----------------------------------------------------------------------

LEAVING = PPOConfig(rollout=RolloutConfig(offload_trainers=True))


def test_where_trainers_leave_a_device_needs_the_larger_of_the_two():
    _, [plain, _] = found(SHARED)
    _, [leaving, beside] = found(SHARED, config=LEAVING)
    assert not plain.leave and leaving.leave and beside.leave
    assert plain.needs["rollout"] == leaving.needs["rollout"]
    stays = sum(sum(need.stays.values()) for need in plain.needs.values())
    engine = sum(plain.needs["rollout"].at_work.values())
    assert leaving.beside("actor") == plain.beside("actor") == stays + 2 * PROCESS_BYTES
    assert leaving.beside("rollout") == 2 * PROCESS_BYTES
    trainers = max(leaving.beside(role) + sum(leaving.needs[role].at_work.values()) for role in ("actor", "reference"))
    assert leaving.peak == max(trainers, 2 * PROCESS_BYTES + engine)
    assert leaving.stays == plain.stays
    for role in ("actor", "reference"):
        assert sum(leaving.needs[role].on_host.values()) == sum(plain.needs[role].stays.values()) > 0
    assert sum(size for _, size in leaving.terms()) == leaving.peak


def test_where_no_device_is_shared_nobody_leaves():
    _, found_budgets = found(SPLIT, config=LEAVING)
    assert found_budgets == found(SPLIT)[1]


def test_an_engine_that_works_alone_may_have_the_whole_device():
    alone = {"actor": need(50, 5), "rollout": Need({}, {"weights": 10 * GIB, "KV cache": 60 * GIB})}
    assert Budget((0,), alone, 2, shares=True).peak == 122 * GIB
    leaving = Budget((0,), alone, 2, shares=True, leave=True)
    assert (leaving.peak, leaving.worker) == (72 * GIB, "rollout")
    assert dict(leaving.terms()) == {
        "rollout weights": 10 * GIB,
        "rollout KV cache": 60 * GIB,
        "CUDA and NCCL": 2 * GIB,
    }
    of_torch = Budget((0,), {"actor": need(50, 5), "rollout": need(10, 20)}, 1, shares=False, leave=True)
    assert (of_torch.peak, of_torch.worker, of_torch.stays) == (66 * GIB, "actor", 61 * GIB)


def test_the_remedy_that_trainers_leave():
    job = job_of(SHARED.replace("tensor_parallel_size: 2", "engine_kwargs: {kv_cache_memory_bytes: 1}"))
    engine = Need({}, {"weights": 10 * GIB, "KV cache": 60 * GIB})
    (message,) = fit.too_large(job, [Budget((0,), {"actor": need(50, 5), "rollout": engine}, 2, shares=True)], 80 * GIB)
    assert message.endswith(
        f"lower rollout.engine_kwargs.kv_cache_memory_bytes to {18 * GIB} (18 GiB) or less, or set "
        "rollout.offload_trainers=true, so that 50.0 GiB of the others leave meanwhile"
    )
    whole = {"actor": need(70, 5), "rollout": Need({"weights": 0}, {"weights": 10 * GIB, "KV cache": 60 * GIB})}
    (message,) = fit.too_large(job, [Budget((0,), whole, 2, shares=True)], 80 * GIB)
    assert message.endswith("); set rollout.offload_trainers=true, so that 70.0 GiB of the others leave meanwhile")
    assert list(fit.too_large(job, [Budget((0,), whole, 2, shares=True, leave=True)], 80 * GIB)) == []
    job, unsized = found(SHARED)
    full = [replace(unsized[0], needs={**unsized[0].needs, "actor": need(78)})]
    (message,) = fit.unsized_cache(job, full, 80 * GIB)
    assert "nothing is left for it; with rollout.offload_trainers=true " in message
    assert message.endswith(f"{77 * GIB} (77 GiB) is the most that fits")
