import time
from pathlib import Path

import pytest

from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder, new_run, open_run


def finished_run(root: Path) -> Path:
    run = new_run(root, "demo")
    run.config.write_text("a: 1\n")
    (run.checkpoints / "step_1").mkdir()
    return run.path


def test_a_run_gets_its_folders_and_latest_points_at_the_newest(tmp_path: Path):
    first, second = new_run(tmp_path / "runs", "demo"), new_run(tmp_path / "runs", "demo")
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs" / "demo"
    assert all(folder.is_dir() for folder in (second.tensorboard, second.checkpoints, second.logs))
    latest = tmp_path / "runs" / "demo" / "latest"
    assert latest.is_symlink()
    assert latest.resolve() == second.path.resolve()
    assert sorted(p.name for p in latest.parent.iterdir()) == sorted([first.path.name, second.path.name, "latest"])


def test_a_run_that_begins_at_the_same_moment_takes_the_next_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other command makes its folder after this one has looked, and before this one makes its own."""
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    new_run(tmp_path, "demo")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert [new_run(tmp_path, "demo").path.name for _ in range(2)] == ["now-2", "now-3"]


def test_latest_opens_the_run_at_its_real_path(tmp_path: Path):
    path = finished_run(tmp_path)
    assert open_run(tmp_path / "demo" / "latest").path == path.resolve()


def test_an_unwritable_root_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run folder .*file/runs/demo cannot be written \(Not a directory\)"):
        new_run(tmp_path / "file" / "runs", "demo")


@pytest.mark.parametrize("name", ["", "a/b", "..", "latest"])
def test_an_experiment_name_that_is_not_a_folder_name_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="experiment_name="):
        new_run(tmp_path, name)


def test_resuming_a_folder_that_is_not_a_run_names_the_missing_files(tmp_path: Path):
    with pytest.raises(UserError, match="is not a folder"):
        open_run(tmp_path / "absent")
    with pytest.raises(UserError, match=r"has no config.yaml and no checkpoints/"):
        open_run(tmp_path)
    path = finished_run(tmp_path)
    (path / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"has no config.yaml; give"):
        open_run(path)


def test_a_real_folder_called_latest_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "demo" / "latest").mkdir(parents=True)
    run = new_run(tmp_path, "demo")
    assert run.logs.is_dir()
    assert "was not pointed at" in caplog.text
    assert not list((tmp_path / "demo").glob(".latest*"))


def test_the_run_of_an_adapter_is_resumed_by_its_job(tmp_path: Path):
    job = RunFolder(tmp_path / "adapters" / "now")
    own = job.adapter("math")
    own.make(again=True)
    job.config.touch()
    assert own.path == tmp_path / "adapters" / "now" / "adapters" / "math"
    assert own.job == job.path == job.job, "an experiment may be called adapters"
