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
