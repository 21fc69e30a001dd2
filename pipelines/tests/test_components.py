import socket

from pipelines import components


def role(**arguments):
    (only,) = components.train(config="configs/a.yaml", run_dir="/runs/a", **arguments).roles
    return only


def test_the_command_names_module_config_run_and_overrides():
    (only,) = components.train("seed=3", config="configs/a.yaml", run_dir="/runs/a").roles
    assert only.args[1].endswith("-m pipelines.train --config configs/a.yaml --run-dir /runs/a seed=3")


def test_workers_get_the_projects_settings_and_extra_variables():
    only = role(threads=4, restarts=1, env={"EXTRA": "1"})
    wanted = {"OMP_NUM_THREADS": "4", "PET_MAX_RESTARTS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "EXTRA": "1"}
    assert wanted.items() <= only.env.items()


def test_a_group_runs_any_module_with_its_arguments():
    (only,) = components.group("--run-dir", "/runs/a b", module="pipelines.evaluate", j="1x4").roles
    assert only.args[1].endswith("--nproc_per_node 4 --tee 3 --role '' -m pipelines.evaluate --run-dir '/runs/a b'")
    assert components.WORKER_ENV.items() <= only.env.items()


def test_a_single_process_is_started_without_torchrun():
    app = components.single("--input", "a b", module="pipelines.prepare", env={"EXTRA": "1"}, mem_mb=123)
    (only,) = app.roles
    assert app.name == "prepare"
    assert (only.entrypoint, only.args) == ("python", ["-m", "pipelines.prepare", "--input", "a b"])
    assert only.env == {"EXTRA": "1"} and only.resource.memMB == 123 and only.num_replicas == 1


def test_jobs_on_several_nodes_get_ports_of_their_own():
    ports = {role(j="2x1").port_map["c10d"] for _ in range(8)}
    assert len(ports) > 1
    assert role(j="2x1", rdzv_port=23456).port_map["c10d"] == 23456


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        free = components.free_port()
        offered = iter([busy, free])
        monkeypatch.setattr(components.random.SystemRandom, "randint", lambda *_: next(offered))
        assert components.free_port() == free
