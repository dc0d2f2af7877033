"""States of ranks and servers, read from a run's files."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path

import pytest

from megarl.launcher import status
from megarl.launcher.status import Ask, states, view
from megarl.observe.run_folder import RunFolder


def test_ranks_without_a_watchdog_record_are_known_by_their_timeline(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.logs, folder.timeline):
        path.mkdir()
    (folder.logs / "rank_1.log").write_text("began\nstep 4 done\n\n")
    (folder.logs / "sglang-0.log").write_text("[info] ready\n")
    (folder.metrics).write_text('{"step": 4, "rollout/reward": 0.5}\n')
    line = {"step": 4, "spans": [["update", "", 1.0, 2.0]], "loads": {"127.0.0.1:9": [[1.0, 8], [2.0, 3]]}}
    (folder.timeline / "rank_0.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 5, "sp')
    rows = states(folder, ask="none")
    assert [row[0] for row in rows] == ["run", "rank 0", "rank 1", "server 127.0.0.1:9", "sglang-0"]
    by_name = {name: (state, log) for name, state, log in rows}
    assert by_name["rank 0"][0].startswith("step 4 ended ")
    assert by_name["rank 0"][0].endswith("ago, with update")
    assert by_name["rank 1"] == ("no step yet", "step 4 done")
    assert by_name["server 127.0.0.1:9"][0] == "3 completions under way at the end of step 4"
    assert by_name["sglang-0"] == ("", "[info] ready")
    assert view(folder).row_count == 5


def test_a_server_that_is_asked_and_gone_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.timeline.mkdir()
    line = {"step": 1, "spans": [], "loads": {"127.0.0.1:9": []}}
    (folder.timeline / "rank_0.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = [row for row in states(folder) if row[0].startswith("server")]
    assert row[1].startswith("idle, 127.0.0.1:9 does not answer")


@pytest.mark.parametrize(("code", "state"), [(200, " answers"), (401, " answers"), (503, " answers with 503")])
def test_a_server_that_wants_a_key_answers(
    tmp_path: Path, code: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "HEALTH_S", 300.0)

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers everything with one code."""

        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as served:
        address = f"127.0.0.1:{served.server_port}"
        thread = threading.Thread(target=served.handle_request)
        thread.start()
        folder = RunFolder(tmp_path)
        folder.logs.mkdir()
        (folder.logs / "server_0").write_text(address)
        (folder.logs / "server_0.log").write_text("ready\n")
        assert states(folder)[-1][1] == address + state
        thread.join(300)


def test_the_servers_of_a_finished_run_are_not_asked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.timeline.mkdir()
    line = {"step": 4, "spans": [], "loads": {"127.0.0.1:9": []}}
    (folder.timeline / "rank_0.jsonl").write_text(json.dumps(line) + "\n")
    for summary, is_asked in (('{"steps": 4}', False), ('{"steps": 3}', True), ('{"steps": "x"}', True)):
        folder.summary.write_text(summary)  # of step 3: the run goes on after a resume
        (row,) = [row for row in states(folder) if row[0].startswith("server")]
        assert ("does not answer" in row[1]) is is_asked


def test_damaged_lines_and_summaries_are_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 3}\n{"st\n{"step": 4, "train/loss": "x"}\ndamaged\n')
    for summary, state in (("{", ""), ('{"steps": 4}', "finished, "), ('{"stopped_early": true}', "stopped, ")):
        folder.summary.write_text(summary)
        ((name, text, _),) = states(folder)
        assert name == "run"
        assert text.startswith(f"{state}step 4, ")
        assert text.endswith(" ago")
    folder.metrics.write_text('{"step": "x"}\n')
    assert states(folder)[0][1] == "the last line of metrics.jsonl has no step"


@pytest.mark.parametrize("address", ["h:abc", "127.0.0.1:99999", "[::1", "a..b:1", "", "h\\n:1"])
@pytest.mark.parametrize("ask", ["all", "loopback", "none"])
def test_odd_addresses_break_nothing(tmp_path: Path, address: str, ask: Ask) -> None:
    folder = RunFolder(tmp_path)
    folder.timeline.mkdir()
    line = {"step": 1, "spans": [], "loads": {address: []}}
    (folder.timeline / "rank_0.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = [row for row in states(folder, ask) if row[0].startswith("server")]
    assert row[1].startswith("idle")


def test_of_other_machines_servers_are_asked_only_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Recorder:
        """Stands for a connection to another machine, which no test may reach."""

        def __init__(self, address: str, timeout: float) -> None:
            self.host = address.rpartition(":")[0]

        def request(self, method: str, path: str) -> None:
            asked.append(self.host)
            raise ConnectionRefusedError

        def close(self) -> None:
            pass

    monkeypatch.setattr("megarl.launcher.status.http.client.HTTPConnection", Recorder)
    folder = RunFolder(tmp_path)
    for path in (folder.timeline, folder.logs):
        path.mkdir()
    near = ["localhost", "127.0.0.1", "127.8.0.1", "::1"]
    far = ["10.0.0.1", "evil.example", "127.0.0.1.evil.example", "127.1", "0.0.0.0"]
    line = {"step": 1, "spans": [], "loads": {f"{host}:9": [] for host in near + far}}
    (folder.timeline / "rank_0.jsonl").write_text(json.dumps(line) + "\n")
    (folder.logs / "server_0").write_text("10.0.0.2:9\n")
    (folder.logs / "server_0.log").write_text("ready\n")
    for ask, hosts in (("none", []), ("loopback", near), ("all", [*near, *far, "10.0.0.2"])):
        asked.clear()
        states(folder, ask)  # type: ignore[arg-type]
        assert asked == hosts
