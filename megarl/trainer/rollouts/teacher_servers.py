"""The SGLang servers of a teacher: found, or started for the run. They never get weights of the run."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from megarl.config import Config
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.rollout.client.connections import plain_address
from megarl.rollout.client.scoring import Scorer
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.servers.external import ExternalServer
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.servers.supervisor import Supervisor
from megarl.teacher_checks import gpus_before_teacher, teacher_servers

log = logging.getLogger(__name__)

KEY_VARIABLE = "MEGARL_TEACHER_API_KEY"
ANSWER_S = 10.0  # of a running server, at the start


class TeacherServers:
    """Rank 0's teacher servers. The constructor starts them and returns; `connect` waits until they answer.

    A server of the run that dies is started again, at most server.max_restarts times; requests wait for it meanwhile.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        teacher = config.teacher
        self.config = config
        self._open = contextlib.ExitStack()
        self._servers: SGLangServers | None = None
        self.api_key = os.environ.get(KEY_VARIABLE, "")
        self.addresses = [plain_address(address) for address in teacher.addresses]
        if (knobs := teacher_servers(config)) is not None:
            folder = logs / "teacher"
            folder.mkdir(parents=True, exist_ok=True)
            first_gpu = sum(gpus_before_teacher(config))
            self._servers = SGLangServers(knobs, local_folder(teacher.path), folder, first_gpu=first_gpu)
            self.addresses, self.api_key = self._servers.addresses, self._servers.api_key
            self._open.callback(self._servers.stop)
            self._servers.start()

    def connect(self) -> None:
        """Waits for the servers.

        Raises:
            ServerError: a server of the run does not start.
            UserError: a server that should run does not answer to the key.
        """
        if self._servers is None:
            for address in self.addresses:
                if not ExternalServer(address, self.api_key).answers(ANSWER_S):
                    raise UserError(
                        f"teacher.addresses: no SGLang server answers at {address} to the key in {KEY_VARIABLE}; start "
                        "it, or leave teacher.addresses out and set teacher.path"
                    )
            return
        self._servers.wait_ready()
        supervisor = Supervisor(self._servers.servers, self.config.server.heartbeat_s, self.config.server.max_restarts)
        supervisor.start()
        self._open.callback(supervisor.close)

    def scorer(self) -> Scorer:
        """Makes a client that scores tokens."""
        teacher = self.config.teacher
        scorer = Scorer(
            self.addresses, self.api_key, teacher.max_requests, self.config.rollout.request_timeout_s, teacher.wait_s
        )
        self._open.callback(scorer.close)
        return scorer

    def sampler(self, vocab_size: int) -> RemoteSGLangEngine:
        """Makes a client that samples completions."""
        engine = RemoteSGLangEngine(self.config.rollout)
        engine.vocab_size = vocab_size
        engine.initialize(self.addresses, api_key=self.api_key)
        self._open.callback(engine.destroy)
        return engine

    def close(self) -> None:
        """Ends the clients, the supervision and the servers of the run."""
        self._open.close()
