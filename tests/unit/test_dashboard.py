"""The dashboard: who is answered, what is answered, and a page that follows a run that is being written."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from megarl.dashboard import ANSWERS, Board, BoardHandler, main
from megarl.knobs import UserError
from megarl.observe.board.run_data import RunData
from megarl.observe.run_folder import RunFolder
from tests.chromium import Chromium, needs_chromium

ID = "grpo/2026-01-01"


def lines(path: Path, rows: list[dict[str, Any]], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8", errors="surrogatepass") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    for name in (ID, "sft/2026-01-02"):
        lines(runs / name / "metrics.jsonl", [{"step": s, "time": s, "rollout/reward": s / 10} for s in range(1, 4)])
    samples = [
        {"step": 1 + n // 10, "problem": n, "reward": n % 5 / 4, "turns": [[False, "q"], [True, f"answer {n}"]]}
        for n in range(50)
    ]
    lines(runs / ID / "samples.jsonl", samples)
    (tmp_path / "secret.txt").write_text("secret")
    (runs / "grpo" / "latest").symlink_to("2026-01-01")
    (runs / "outside").symlink_to(tmp_path)
    return runs


@pytest.fixture
def board(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setattr(BoardHandler, "timeout", 600.0)  # a busy test asks late
    with Board(root, 0) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join(300)


def get(board: Board, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_address[1], timeout=300)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, reply.headers, body


def ask(board: Board, name: str, **query: Any) -> Any:
    status, _, body = get(board, f"/api/{name}?{urlencode(query)}", X_Megarl_Key=board.key)
    assert status == 200, body
    return json.loads(body)


def test_it_listens_on_loopback_alone(board: Board) -> None:
    assert board.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/trace?run=" + ID, "/nothing"])
@pytest.mark.parametrize("key", ["", "wrong", "ké", "k" * 5000])
def test_without_the_key_nothing_is_answered(board: Board, path: str, key: str) -> None:
    status, _, body = get(board, path, X_Megarl_Key=key.encode().decode("latin-1"))
    assert status == 401
    assert b"step" not in body
    assert board.key.encode() not in body


def test_the_key_counts_in_the_address_and_in_the_header(board: Board) -> None:
    assert get(board, f"/?key={board.key}")[0] == 200
    assert get(board, f"/api/runs?key={board.key}")[0] == 200
    assert get(board, "/api/runs", X_Megarl_Key=board.key)[0] == 200
    assert len(board.key) >= 32


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", ""])
def test_a_name_that_was_pointed_at_this_machine_is_refused(board: Board, host: str) -> None:
    assert get(board, f"/api/runs?key={board.key}", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:8888", "127.0.0.1:1", "[::1]:6007", "localhost"])
def test_a_tunnel_s_port_may_differ(board: Board, host: str) -> None:
    assert get(board, f"/api/runs?key={board.key}", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost:8888", "http://localhost:9999"])
def test_pages_of_other_sites_are_refused(board: Board, origin: str) -> None:
    assert get(board, f"/api/runs?key={board.key}", Host="localhost:8888", Origin=origin)[0] == 403


@pytest.mark.parametrize(
    "run", ["..", "../secret.txt", "/etc", "grpo/latest", "outside", "outside/secret.txt", "grpo", "%2e%2e", "\0", ""]
)
@pytest.mark.parametrize("name", ["curves", "run", "state", "timeline", "samples", "trace"])
def test_only_runs_of_the_list_can_be_named(board: Board, name: str, run: str) -> None:
    query = urlencode({"run": run, "source": "training"})
    status, _, body = get(board, f"/api/{name}?{query}", X_Megarl_Key=board.key)
    assert status == 404
    assert b"secret" not in body.replace(b"secret.txt", b"")


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "//etc/passwd", "/api/../../secret.txt", "/board.js", "/api/", "/x"]
)
def test_addresses_are_names_and_no_paths_of_files(board: Board, path: str) -> None:
    assert get(board, path, X_Megarl_Key=board.key)[0] == 404


@pytest.mark.parametrize("source", ["../samples", "step-000009", "training/../../secret.txt", ""])
def test_only_sources_of_the_run_can_be_named(board: Board, source: str) -> None:
    assert ask(board, "samples", run=ID, source=source) == {"samples": [], "next": None, "matching": 0, "all": 0}


def test_every_answer_forbids_foreign_scripts_frames_and_caches(board: Board) -> None:
    for path in (f"/?key={board.key}", f"/api/runs?key={board.key}", "/"):
        _, headers, _ = get(board, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_nothing_can_be_changed(board: Board, method: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_address[1], timeout=300)
    connection.request(method, "/api/runs", headers={"X-Megarl-Key": board.key})
    assert connection.getresponse().status == 501
    connection.close()


def test_the_list_has_each_run_once_the_one_that_wrote_last_first(board: Board, root: Path) -> None:
    found = ask(board, "runs")["runs"]
    assert sorted(run["id"] for run in found) == [ID, "sft/2026-01-02"]
    assert all(run["step"] == 3 and run["state"] == "running" for run in found)


@pytest.mark.parametrize(
    ("line", "summary"),
    [('{"step": "x"}', '{"steps": 3}'), ("{}", "{}"), ('{"step": NaN}', ""), ('{"step": 4}', '{"steps": [1]}')],
)
def test_a_damaged_run_hides_no_other(board: Board, root: Path, line: str, summary: str) -> None:
    with (root / ID / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    (root / ID / "summary.json").write_text(summary)
    found = {run["id"]: run for run in ask(board, "runs")["runs"]}
    assert found[ID]["state"] == "damaged"
    assert found["sft/2026-01-02"]["state"] == "running"


def test_figures_that_are_no_numbers_are_left_out_of_the_list(board: Board, root: Path) -> None:
    lines(root / ID / "metrics.jsonl", [{"step": 4, "train/loss": float("nan"), "rollout/reward": 0.5}])
    (root / ID / "summary.json").write_text('{"accuracy_before": "x", "accuracy_after": "y", "wall_s": NaN}')
    (run,) = [run for run in ask(board, "runs")["runs"] if run["id"] == ID]
    assert run["figures"] == {"rollout/reward": 0.5}
    assert ask(board, "run", run=ID)["facts"] == [["steps", "4"]]


def test_a_run_s_own_folder_can_be_served(root: Path) -> None:
    with Board(root / ID, 0) as board:
        assert list(board.catalog.folders()) == ["."]


def test_a_job_of_several_adapters_is_listed_by_its_adapters(tmp_path: Path) -> None:
    job = tmp_path / "runs" / "grpo" / "now"
    for folder in (job, job / "adapters" / "bold", job / "adapters" / "careful"):
        (folder / "logs").mkdir(parents=True)
        (folder / "config.yaml").touch()
    with Board(tmp_path / "runs", 0) as served:
        assert sorted(served.catalog.folders()) == ["grpo/now/adapters/bold", "grpo/now/adapters/careful"]


def test_curves_are_sent_again_only_when_they_grew(board: Board, root: Path) -> None:
    first = ask(board, "curves", run=ID)
    assert first["series"]["rollout/reward"] == [[1, 2, 3], [0.1, 0.2, 0.3]]
    assert ask(board, "curves", run=ID, have=first["stamp"]) == {"stamp": first["stamp"]}
    with (root / ID / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/rew')
    assert ask(board, "curves", run=ID, have=first["stamp"]) == {"stamp": first["stamp"]}  # half a line
    with (root / ID / "metrics.jsonl").open("a") as file:
        file.write('ard": 0.4}\n')
    assert ask(board, "curves", run=ID, have=first["stamp"])["series"]["rollout/reward"][0] == [1, 2, 3, 4]


def test_damaged_metrics_and_summaries_leave_a_run_s_state(board: Board, root: Path) -> None:
    with (root / ID / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")
    (root / ID / "summary.json").write_text("{")
    ((name, state, _),) = ask(board, "state", run=ID)["states"]
    assert (name, state.split(",")[0]) == ("run", "step 3")


def test_samples_are_found_by_reward_step_and_text_and_paged(board: Board) -> None:
    page = ask(board, "samples", run=ID, source="training", least=1, most=1, count=4)
    assert [sample["problem"] for sample in page["samples"]] == [4, 9, 14, 19]
    assert (page["matching"], page["all"]) == (10, 50)
    following = ask(board, "samples", run=ID, source="training", least=1, most=1, start=page["next"])
    assert [sample["problem"] for sample in following["samples"]] == [24, 29, 34, 39, 44, 49]
    assert following["next"] is None
    of_step = ask(board, "samples", run=ID, source="training", first=2, last=2, text="ANSWER 1", count=100)
    assert [sample["problem"] for sample in of_step["samples"]] == list(range(10, 20))


@pytest.mark.parametrize("query", [{"least": "nan"}, {"start": "x"}, {"count": "1e999"}, {"first": "1;2"}])
def test_parameters_that_are_no_numbers_are_refused_in_one_line(board: Board, query: dict[str, str]) -> None:
    address = f"/api/samples?{urlencode({'run': ID, 'source': 'training'} | query)}"
    status, _, body = get(board, address, X_Megarl_Key=board.key)
    assert status == 400
    assert body.count(b"\n") == 1


def test_megabyte_texts_are_cut_and_odd_bytes_are_shown(board: Board, root: Path) -> None:
    text = "x" * 3_000_000
    with (root / ID / "samples.jsonl").open("wb") as file:
        file.write(json.dumps({"step": 1, "reward": 1, "turns": [[True, text]]}).encode() + b"\n")
        file.write(b'{"step": 2, "reward": 0, "turns": [[true, "\xff\xfe \\ud800"]]}\n')
        file.write(b'{"step": 3, "reward": 0, "turns": "none", "completion": 5}\n')
    status, _, body = get(board, f"/api/samples?{urlencode({'run': ID, 'source': 'training'})}", X_Megarl_Key=board.key)
    assert status == 200
    assert len(body) < 100_000
    first, second, third = json.loads(body)["samples"]
    ((sampled, start, left_out),) = first["turns"]
    assert sampled
    assert start == "x" * len(start)
    assert len(start) + left_out == len(text)
    assert second["turns"][0][1] == "\ufffd\ufffd \ud800"
    assert third["turns"][1][1] == "5"


def test_requests_that_are_no_http_leave_it_answering(board: Board) -> None:
    too_long = b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"
    for bytes_sent in (b"\x16\x03\x01\x00\xff", too_long, b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(board.server_address[:2], timeout=300) as connection:
            connection.sendall(bytes_sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert len(ask(board, "runs")["runs"]) == 2


def test_big_runs_are_answered_in_few_bytes(board: Board, root: Path) -> None:
    names = [f"train/metric_{n}" for n in range(20)]
    rows = [{"step": s, **dict.fromkeys(names, s * 0.001)} for s in range(1, 5001)]
    lines(root / ID / "metrics.jsonl", rows)
    spans = [["rollout", "", 1.0, 2.0]] * 3
    lines(root / ID / "timeline" / "rank_0.jsonl", [{"step": s, "spans": spans, "loads": {}} for s in range(1, 5001)])
    assert len(json.dumps(ask(board, "curves", run=ID))) < 20 * 20 * 1000
    answer = ask(board, "timeline", run=ID, first=0, last=10_000)
    assert (answer["first"], answer["last"]) == (4951, 5000)
    assert sum(len(lane["spans"]) for lane in answer["lanes"]) == 150


def test_the_trace_can_be_downloaded(board: Board, root: Path) -> None:
    line = {"step": 1, "spans": [["update", "", 1.0, 2.0]], "loads": {}}
    lines(root / ID / "timeline" / "rank_0.jsonl", [line])
    status, headers, body = get(board, f"/api/trace?{urlencode({'run': ID, 'key': board.key})}")
    assert status == 200
    assert headers["Content-Disposition"] == 'attachment; filename="trace.json"'
    assert [event["name"] for event in json.loads(body)["traceEvents"]] == ["process_name", "thread_name", "update"]


def test_a_trace_that_breaks_off_has_one_answer(
    board: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"/api/trace?{urlencode({'run': ID, 'key': board.key})}"
    for error in (OSError(5, "disk"), ValueError("damaged"), KeyError("spans"), BrokenPipeError("closed")):

        def broken(run: RunData, error: Exception = error) -> Iterator[str]:
            yield "["
            raise error

        monkeypatch.setattr("megarl.dashboard.trace_text", broken)
        assert get(board, address)[::2] == (200, b"[")
    assert "Traceback" not in capsys.readouterr().err


def test_clients_that_leave_are_no_errors(board: Board, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError(), ConnectionResetError(), ValueError("shown")):
        try:
            raise error
        except (OSError, ValueError):
            board.handle_error(None, None)
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 1
    assert "ValueError: shown" in shown


def test_a_run_s_servers_are_asked_on_this_machine_alone(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def recorded(folder: RunFolder, ask: str) -> list[tuple[str, str, str]]:
        asked.append(ask)
        return []

    monkeypatch.setattr("megarl.dashboard.states", recorded)
    assert ask(board, "state", run=ID) == {"states": []}
    assert asked == ["loopback"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "usage: python -m megarl.dashboard"),
        (["host=0.0.0.0"], "usage: python -m megarl.dashboard"),
        (["port=x"], "port=x must be a number"),
        (["port=65536"], "port=65536 must be a number"),
        (["/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        main(arguments)
    assert "\n" not in str(error.value)


def test_a_port_in_use_is_named(board: Board, root: Path) -> None:
    with pytest.raises(UserError, match="cannot be bound"):
        main([str(root), f"port={board.server_address[1]}"])


@needs_chromium
def test_a_page_follows_runs_that_are_being_written(board: Board, root: Path) -> None:
    (root / ID / "metrics.jsonl").touch()  # the newest
    with Chromium() as browser:
        browser.open(board.address)
        browser.until("document.body.innerText.includes('2 runs, 1 compared')")
        browser.until("document.querySelectorAll('#charts svg.plot').length === 1")
        lines(root / ID / "metrics.jsonl", [{"step": 4, "rollout/reward": 0.9, "train/loss": 1.0}], mode="a")
        browser.until("document.body.innerText.includes('step 4')")
        browser.until("document.querySelectorAll('#charts svg.plot').length === 2")
        browser.run("document.querySelectorAll('.run input')[1].click()")
        browser.until("document.querySelectorAll('#charts .chart:first-child .legend span').length === 2")
        assert "sft/2026-01-02" in browser.run("document.querySelector('#charts .legend').innerText")
        lines(root / "new" / "2026-01-03" / "metrics.jsonl", [{"step": 1, "train/loss": 1.0}])
        browser.until("document.body.innerText.includes('3 runs, 2 compared')")
        assert browser.run("document.querySelectorAll('.sample').length") == 20
        assert browser.complaints == []
        board.key = "that of a dashboard started anew"
        browser.until("document.querySelector('.banner').innerText.includes('the key is missing or wrong')")


@needs_chromium
def test_a_page_shows_curves_though_the_state_cannot_be_told(
    board: Board, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(board: Board, query: dict[str, str]) -> dict[str, Any]:
        raise ValueError("no state")

    monkeypatch.setitem(ANSWERS, "state", broken)
    with Chromium() as browser:
        browser.open(board.address)
        browser.until("document.body.innerText.includes('no state')")
        browser.until("document.querySelectorAll('#charts svg.plot').length === 1")


@pytest.mark.long
def test_the_command_prints_the_address_with_its_key(root: Path) -> None:
    command = [sys.executable, "-m", "megarl.dashboard", str(root), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()
        shown = process.stdout.readline()
        process.terminate()
    assert address[0] == "dashboard"
    assert address[1].startswith("http://127.0.0.1:")
    assert "?key=" in address[1]
    assert shown.startswith("runs      2 in")


def test_a_run_that_is_removed_meanwhile_is_no_longer_there(board: Board, root: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("megarl.dashboard.LIST_S", 0.0)
    assert len(ask(board, "runs")["runs"]) == 2
    shutil.rmtree(root / "sft")
    assert [run["id"] for run in ask(board, "runs")["runs"]] == [ID]
