"""Bugs written by hand in what holds hostile use: the sandbox, guarded servers, damaged checkpoints, dying servers."""

from __future__ import annotations

from mutant import Bugs, unit

HOSTILE: Bugs = {
    "megarl/sandbox/activity.py": {
        unit("sandbox/test_sandbox"): [
            ("a wait for a processor is sleep", "sum(self._waited_s.values())", "0.0"),
            ("a process always seems to work", 'bool({"R", "D", ""} & set(states))', "True"),
            ("a process never seems to work", 'bool({"R", "D", ""} & set(states))', "False"),
            ("threads are not counted", "return len(tasks)", "return 1"),
            ("the client's work is none", "return sum(int(field)", "return 0.0 * sum(int(field)"),
        ],
    },
    "megarl/sandbox/client.py": {
        unit("sandbox/test_sandbox", "sandbox/test_judge", "sandbox/test_late_clients"): [
            ("sleepers are not ended", "            run.overslept = True\n            run.stop()", "            pass"),
            ("sleepers fail as any other", 'status = "sleep"', 'status = "failed"'),
            ("a late client is a program's sleep", "for run in runs) + away.seconds()", "for run in runs)"),
            ("a late client's wait goes on to its end", "max(0.0, end - max(begin, told))", "0.0"),
            ("a program sleeps while its judge works", "sum(run.activity", "min(run.activity"),
        ],
    },
    "megarl/sandbox/isolation.py": {
        unit("sandbox/test_files_in_memory"): [
            ("no namespaces are entered", "features.namespaces and _enter_namespaces(folder)", "False"),
            ("files are on the disk", '            libc.mount(b"tmpfs"', '            0 and libc.mount(b"tmpfs"'),
        ],
    },
    "megarl/sandbox/judge.py": {
        unit("sandbox/test_judge"): [
            ("any object passes for a module", "return bool(used) and all(", "return True or all("),
            ("no object passes for a module", "return bool(used) and all(", "return False and all("),
            ("attributes of other names count", "if owner == name]", "]"),
        ],
    },
    "megarl/sandbox/system_calls.py": {
        unit("sandbox/test_sandbox", "sandbox/test_attacks"): [
            ("clocks of other processes answer", "_ANY_OF, 0, 1, NEGATIVE", "_EQUAL, 0, 1, NEGATIVE"),
            ("files open past the cache", "PAST_THE_CACHE), refuse, (_AND", "0), refuse, (_AND"),
            ("the cache is left later", "PAST_THE_CACHE), refuse, allow]", "0), refuse, allow]"),
        ],
    },
    "megarl/rewards/pool.py": {
        unit("rewards/test_pool"): [
            ("waiting for a turn counts", "passed - max(0.0, waited_s(self.pid) - self.waited_before_s)", "passed"),
            ("a call may take three times its limit", "> self.scoring.limit_s", "> 3 * self.scoring.limit_s"),
        ],
    },
    "megarl/rewards/code.py": {
        unit("rewards/test_code"): [
            ("sleep of a sample is not counted", "result.cpu_s + result.sleep_s", "result.cpu_s"),
        ],
    },
    "megarl/rollout/servers/guarded_launch.py": {
        unit("rollout/test_guarded_launch"): [
            ("integers of more than 32 bits pass", "value > MAX_INT32:", "False:"),
            ("the largest integer is refused", "value > MAX_INT32:", "value >= MAX_INT32:"),
            ("negative ids of tokens pass", "and not 0 <= token < vocab_size]", "and not token < vocab_size]"),
            ("the first id outside the vocabulary passes", "0 <= token < vocab_size]", "0 <= token <= vocab_size]"),
            ("ids that are no index are refused", 'if params.get("min_new_tokens") and isinstance', "if isinstance"),
        ],
    },
    "megarl/rollout/servers/sglang_server.py": {
        unit("rollout/test_server_processes"): [
            (
                "a dying server is reported by its children",
                "        if own in (psutil.STATUS_ZOMBIE, GONE):",
                "        if False:",
            ),
            ("a stopped server is not seen", "        if own == psutil.STATUS_STOPPED:", "        if False:"),
            ("a child that ended is not seen", "(psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, GONE)", "(GONE,)"),
        ],
    },
    "megarl/launcher/ray.py": {
        unit("launcher/test_ray"): [
            ("Ray's own class of errors passes", "except Exception as error:  #", "except OSError as error:  #"),
            (
                "the folder of a failed start stays",
                "        if scratch is not None:\n            shutil",
                "        if False:\n            shutil",
            ),
            ("an own cluster is started once", "starts = 1 if address else STARTS", "starts = 1"),
            ("a given cluster is tried again", "starts = 1 if address else STARTS", "starts = STARTS"),
            ("a failed start is not cleared away", "ray.shutdown()  # what", "pass  # what"),
        ],
    },
    "megarl/trainer/checkpoints/manifest.py": {
        unit("trainer/test_damaged_checkpoints"): [
            (
                "a file without rights raises",
                ".stat().st_size\n    except OSError as error:",
                ".stat().st_size\n    except KeyError as error:",
            ),
        ],
    },
    "megarl/rollout/client/completions.py": {
        unit("rollout/test_sglang_client", "rollout/test_sampling_seeds"): [
            (
                "a group's answers are dealt from the start",
                "itertools.islice(parts, len(queued.inputs))",
                "itertools.islice(iter(list(parts)), len(queued.inputs))",
            ),
            (
                "a group that nobody awaits goes on",
                "if all(queued.parts.cancelled() for queued in group):",
                "if False:",
            ),
            ("completions share a seed", "take(seed, count)", "take(seed, 1) * count"),
        ],
    },
}
