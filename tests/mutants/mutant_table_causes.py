"""Bugs written by hand in batches, and in what finds the cause of a failure and keeps it until the user sees it."""

from __future__ import annotations

from mutant import Bugs, unit

CAUSES: Bugs = {
    "megarl/data/collate.py": {
        unit("data/test_collate"): [
            ("orders repeat along seed + epoch", "self.seed * 1_000_003 + self.epoch", "self.seed + self.epoch"),
            (
                "the loader draws from the global generator",
                "generator=torch.Generator().manual_seed(config.seed),",
                "generator=None,",
            ),
            (
                "processes are copies of the trainer",
                '"multiprocessing_context": "spawn"',
                '"multiprocessing_context": "fork"',
            ),
            ("a batch is waited for without a deadline", '"timeout": BATCH_DEADLINE_S', '"timeout": 0'),
            ("what cannot be pickled passes", "pickle.dumps((dataset, collate_fn))", "pass"),
            ("a row's own error is the loader's", 'if not (lost or said.startswith("DataLoader")):', "if False:"),
            ("a lost connection is a row's error", "ConnectionError, EOFError)", "EOFError)"),
            ("an ended connection is a row's error", "ConnectionError, EOFError)", "ConnectionError)"),
            ("a row's lost connection is the loader's", "self.loader.num_workers > 0 and", "True and"),
        ],
    },
    "megarl/cli.py": {
        unit("launcher/test_local"): [
            ("what was printed stands below the error", "reconfigure(line_buffering=True)", "reconfigure()"),
        ],
    },
    "megarl/observe/logger.py": {
        unit("observe/test_logger"): [
            ("a full disk prints a traceback", "            _leave_errors_to_flush()\n", ""),
        ],
    },
    "megarl/rollout/servers/server_config.py": {
        unit("rollout/test_server_config"): [
            (
                "a port cannot be had by its server",
                "probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from",
                "pass  # from",
            ),
            (
                "a held port is free",
                "            probe.bind((host, port))\n        except OSError:\n            probe.close()",
                "            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
                "            probe.bind((host, port))\n        except OSError:\n            probe.close()",
            ),
        ],
    },
    "megarl/launcher/watch.py": {
        unit("launcher/test_watch"): [
            (
                "a rank that another one broke is the cause",
                "broken = is_rank and monitor",
                "broken = not is_rank and monitor",
            ),
            ("the cause that ends last is not looked for", "            if code:\n", "            if not code:\n"),
            ("a rank that stays is not named", "failures += _report_late(ranks, monitor)", "pass"),
            ("a lost rank 0 is not told", " and not task.lost()", ""),
        ],
    },
    "megarl/parallel/watchdog.py": {
        unit("parallel/test_watchdog"): [
            ("a rank that waits is named", "> stalled_s]", "> 10 * stalled_s]"),
            ("a rank that works on is named", "> stalled_s]", ">= 0]"),
            ("an error of the file system ends the beats", "except OSError as error:", "except KeyError as error:"),
        ],
    },
    "megarl/rollout/servers/supervisor.py": {
        unit("rollout/test_supervisor"): [
            (
                "a server that went long ago is the cause",
                "            elif status.state == SERVING:\n                return\n",
                "",
            ),
            (
                "a restart during a look hides the death",
                "status.server.fault() is not None or status.state not in (SERVING, ADMITTED):",
                "status.state not in (SERVING, ADMITTED) or status.server.fault() is not None:",
            ),
            ("the server that went first is the cause", "cause[0], reverse=True", "cause[0], reverse=False"),
            (
                "a server that was stopped is ready",
                "if status.held or status.put_off is not None or status.failed_sync:",
                "if status.failed_sync:",
            ),
            (
                "a server that failed in a sync is ready",
                "put_off is not None or status.failed_sync:",
                "put_off is not None:",
            ),
        ],
    },
    "megarl/rollout/servers/sglang_server.py": {
        unit("rollout/test_server_processes"): [
            (
                "a process that ends while it is killed is a failure",
                "with contextlib.suppress(psutil.NoSuchProcess):\n                    member.kill",
                "with contextlib.suppress(KeyError):\n                    member.kill",
            ),
            ("servers after one that stays are left", "                errors.append(error)", "                raise"),
            ("one that is gone is its processes' fault", "(psutil.STATUS_ZOMBIE, GONE):", "(psutil.STATUS_ZOMBIE,):"),
        ],
    },
    "megarl/trainer/rollouts/weight_sync.py": {
        unit("trainer/test_causes_of_an_end"): [
            ("a step without samples becomes a dead server", "except NoSamplesError:", "except KeyError:"),
            ("no server is told from the others", 'getattr(error, "server", "")', '""'),
        ],
    },
    "megarl/rollout/closing.py": {
        unit("trainer/test_causes_of_an_end"): [
            ("an error while closing hides the cause", "if error is None:", "if True:"),
            ("an error while closing is lost", "if error is None:", "if False:"),
        ],
    },
    "megarl/rollout/together.py": {
        unit("rollout/test_together"): [
            ("results come in another order", "for task in tasks]", "for task in tasks[::-1]]"),
        ],
    },
    "megarl/rollout/client/scoring.py": {
        unit("trainer/test_teacher"): [
            ("all requests have less time than one may take", "2 * (self._timeout", "1 * (self._timeout"),
        ],
    },
    "megarl/trainer/checkpoints/saver.py": {
        unit("trainer/test_saver"): [
            ("what is left of an old checkpoint is in the way", "while gone.exists():", "while False:"),
        ],
    },
    "megarl/rollout/bounded_staleness.py": {
        unit("rollout/test_stream_causes"): [
            (
                "an error of a filter is lost",
                "        except Exception as error:\n            self._stop(error)\n        async",
                "        except KeyError:\n            return\n        async",
            ),
        ],
    },
}
