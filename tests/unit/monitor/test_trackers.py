import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import verl
from verl.monitor import trackers
from verl.monitor.trackers import Trackers, check_trackers

WORKER = """
import os, sys, torch, torch.distributed as dist
# torchrun sets it; where it is unset, accelerate sets the number of threads
os.environ.pop("OMP_NUM_THREADS")
from accelerate import PartialState
from accelerate.tracking import GeneralTracker, register_tracker_class
from verl.monitor.trackers import Trackers
from verl.processes import exit_with

started = []

class Everywhere(GeneralTracker):
    '''As wandb's: accelerate itself would run it on every rank.'''
    name, requires_logging_directory, main_process_only, tracker = "everywhere", False, False, None
    def __init__(self, project): started.append(dist.get_rank())

register_tracker_class(Everywhere)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.distributed_c10d._world
torch.set_num_threads(3)
before = (dist.group.WORLD, dict(world.pg_map), world.group_count, dist.get_backend_config())
config = {"actor": {"lr": 1e-6}, "reward": {"kwargs": {"api_key": "hunter2"}}}
tracker = Trackers(["tensorboard", "everywhere"], sys.argv[1], project="p", experiment="e", config=config)
assert before == (dist.group.WORLD, dict(world.pg_map), world.group_count, dist.get_backend_config())
assert torch.get_num_threads() == 3
if rank == 0:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.is_main_process) == (2, 0, True)
# construct it on every rank, as other libraries may: still our group
PartialState(cpu=True)
assert before[:3] == (dist.group.WORLD, dict(world.pg_map), world.group_count)
tracker.log(1, {"critic/score/mean": 0.25 if rank == 0 else 99.0})
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
tracker.close()
assert started == ([0] if rank == 0 else [])
dist.destroy_process_group()
os.write(1, f"rank {rank} done ".encode())  # in one piece: the ranks share the pipe
exit_with(lambda: 0)  # as train_ppo.py ends: threads of the group, which `before` holds, live yet
"""


@pytest.fixture(autouse=True)
def fresh_process_state():
    PartialState._reset_state()
    yield
    PartialState._reset_state()


def events(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.dist
def test_under_torchrun_the_process_group_is_ours_and_rank_0_writes(tmp_path):
    script, run_dir = tmp_path / "worker.py", tmp_path / "run"
    script.write_text(WORKER)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(verl.__file__).parents[1])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, script, run_dir], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert "rank 0 done" in done.stdout and "rank 1 done" in done.stdout
    assert events(run_dir / "tensorboard") == {"critic/score/mean": [(1, 0.25)]}
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len([path for path in files if path.parent.name == "tensorboard"]) == 1
    contents = [path.read_bytes() for path in files]
    assert not any(b"hunter2" in content for content in contents)
    assert any(b"reward.kwargs.api_key" in content for content in contents)


def test_torchrun_without_a_process_group_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(AssertionError, match="before the process group"):
        Trackers(["tensorboard"], tmp_path, project="p", experiment="e", config={})


def test_a_resumed_run_replaces_the_steps_that_come_again(tmp_path):
    for first, steps, value in ((0, (1, 2, 3), 1.0), (3, (3, 4), 2.0)):
        run = Trackers(["tensorboard"], tmp_path, project="p", experiment="e", config={}, first_step=first)
        for step in steps:
            run.log(step, {"x": value})
        run.close()
    assert events(tmp_path / "tensorboard") == {"x": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]}


def test_no_trackers_touch_nothing(tmp_path):
    run = Trackers([], tmp_path, project="p", experiment="e", config={})
    run.log(1, {"x": 1.0})
    run.close()
    assert not PartialState._shared_state and not list(tmp_path.iterdir())


def test_what_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    check_trackers(["tensorboard"])
    with pytest.raises(ValueError) as error:
        check_trackers(["tensorboard", "wandb", "comet_ml", "tensorbord"])
    message = str(error.value)
    assert "'wandb' is not installed: pip install wandb" in message
    assert "'comet_ml' is not installed: pip install comet-ml" in message
    assert "'tensorbord' is none of aim, " in message and message.startswith("trainer.trackers: ")


def test_a_tracker_registered_with_accelerate_is_driven(tmp_path, monkeypatch):
    calls = []

    class Mine(GeneralTracker):
        name, requires_logging_directory = "mine", False

        def __init__(self, project):
            super().__init__()
            calls.append(("project", project))

        @property
        def tracker(self):
            return None

        def start(self):
            calls.append(("argv", sys.argv))

        def store_init_configuration(self, values):
            calls.append(("config", values))

        def log(self, values, step=None, **kwargs):
            calls.append(("log", step, values))

        def finish(self):
            calls.append(("finish",))

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mine", Mine)
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "reward.function.kwargs.api_key=hunter2"])
    config = {"hf_token": "hunter2", "actor": {"betas": [0.9, 0.999]}}
    run = Trackers(["mine", "mine"], tmp_path, project="p", experiment="e", config=config)
    run.log(3, {"x": 1.0})
    run.close()
    assert calls == [
        ("project", "p"),
        ("argv", ["train_ppo.py", "reward.function.kwargs.api_key=<redacted>"]),
        ("config", {"hf_token": "<redacted>", "actor.betas": "[0.9, 0.999]"}),
        ("log", 3, {"x": 1.0}),
        ("finish",),
    ]
    assert sys.argv[1].endswith("hunter2")
