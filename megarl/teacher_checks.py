"""Rules of `algorithm=opd` and its teacher. Part of the lists in `checks.py`, which say when each is run."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from megarl.actor import checks as actor_checks
from megarl.actor.config import EngineConfig, LoraConfig
from megarl.algorithms import OPDConfig, name_of
from megarl.config import Config, TeacherConfig, longest_sequence
from megarl.knobs import UserError, run_all
from megarl.rollout.client.connections import addresses_in_environment
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.workflows.distil import hint_columns

# Knobs of the algorithm. lmbda has its own rule; a recipe's n_minibatches is of rollouts, and data has a step a batch.
READ_BY_SFT = ("divergence", "beta", "top_k", "teacher_coef", "data_coef", "lmbda", "n_minibatches")


def teacher_engine(config: Config) -> EngineConfig:
    """Knobs of a frozen teacher: the actor's, with its own checkpoint, and nothing that only training needs."""
    return dataclasses.replace(
        config.actor, path=config.teacher.path, init="checkpoint", mtp="carry", lora=LoraConfig()
    )


def teacher_servers(config: Config) -> SGLangServerConfig | None:
    """Knobs of the teacher's servers that the run starts, None if it starts none.

    They are the rollout servers', with the teacher's number and size.
    """
    teacher = config.teacher
    if not isinstance(config.algorithm, OPDConfig) or teacher.source != "server" or teacher.addresses:
        return None
    return dataclasses.replace(
        config.server, n_servers=teacher.n_servers, tp_size=teacher.tp_size, port=0, colocate=False, quantization="none"
    )


def gpus_before_teacher(config: Config) -> tuple[int, int]:
    """Trainer ranks, and GPUs of the rollout servers that the run starts: the teacher's servers come after them."""
    server, starts = config.server, config.method == "rl" and not addresses_in_environment()
    return config.parallel.world_size(), server.n_servers * server.tp_size if starts else 0


def check_teacher(config: Config) -> None:
    """Refuses a teacher without an algorithm that learns from it, the reverse, and knobs that contradict each other."""
    teacher, algorithm = config.teacher, config.algorithm
    if not isinstance(algorithm, OPDConfig):
        if teacher.source != "none":
            raise UserError(
                f"teacher.source={teacher.source}: algorithm={name_of(algorithm)} has no teacher; set algorithm=opd, "
                "or teacher.source=none"
            )
        return
    if config.method == "preference":
        return  # refused there
    algorithm.check()
    if teacher.source == "none":
        raise UserError(
            "algorithm=opd has no teacher: set teacher.source to trainer, server or policy, and teacher.path"
        )
    _check_source(config, teacher, algorithm)
    _check_hint(config, teacher, algorithm)
    if config.determinism.is_on and teacher.source == "server":
        raise UserError(
            "deterministic=true does not cover teacher.source=server, whose log-probs depend on how requests are "
            "batched; set it to trainer or policy"
        )
    if config.determinism.same_bits and algorithm.divergence != "sampled":
        raise UserError(
            f"deterministic=true holds for algorithm.divergence=sampled, and {algorithm.divergence} computes the "
            "student's log-probs by other functions than the servers; set it to sampled"
        )
    if config.method == "sft":
        for field in dataclasses.fields(algorithm):
            value = getattr(algorithm, field.name)
            if field.name not in READ_BY_SFT and value != field.default:
                raise UserError(
                    f"algorithm.{field.name}={value}: method=sft learns from the teacher and the data alone; leave it "
                    f"at {field.default}"
                )
    if config.method == "sft" and algorithm.divergence == "sampled":
        raise UserError(
            "method=sft: algorithm.divergence=sampled compares tokens that the student sampled, and the data's are not "
            "its own; set it to top_k or full"
        )


def _check_source(config: Config, teacher: TeacherConfig, algorithm: OPDConfig) -> None:
    source, starts = teacher.source, teacher.source == "server" and not teacher.addresses
    if (source == "trainer" or starts) and not teacher.path:
        raise UserError(f"teacher.source={source} needs teacher.path, the teacher's checkpoint; set it")
    if source != "server" and teacher.addresses:
        raise UserError(f"teacher.addresses are for teacher.source=server, not {source}; leave them out")
    if source == "policy" and teacher.path:
        raise UserError("teacher.source=policy is the student itself, so teacher.path is not read; leave it out")
    if source != "trainer" and algorithm.divergence == "full":
        raise UserError(
            f"algorithm.divergence=full needs the teacher's logits, and teacher.source={source} has none beside the "
            "student's; set it to top_k, or teacher.source=trainer"
        )
    if source != "server" and algorithm.lmbda < 1:
        raise UserError(
            f"algorithm.lmbda={algorithm.lmbda}: teacher.source={source} cannot sample; set it to 1, or "
            "teacher.source=server"
        )
    if algorithm.lmbda < 1 and config.method == "sft":
        raise UserError(f"algorithm.lmbda={algorithm.lmbda}: method=sft samples nothing; set it to 1")
    if source == "server" and config.actor.temperature != 1:
        raise UserError(
            f"actor.temperature={config.actor.temperature}: SGLang gives a teacher's log-probs at temperature 1; set "
            "it and gconfig.temperature to 1, or teacher.source=trainer"
        )
    if starts and config.launcher != "local":
        raise UserError(
            f"launcher={config.launcher} starts no teacher; start its servers yourself and give teacher.addresses"
        )
    if starts and config.server.colocate:
        raise UserError(
            "server.colocate=true gives all GPUs to the run's servers and trainer in turn; start the teacher elsewhere "
            "and give teacher.addresses, or set teacher.source=trainer"
        )
    per_node, (ranks, servers) = config.cluster.gpus_per_node, gpus_before_teacher(config)
    needed = ranks + servers + teacher.n_servers * teacher.tp_size
    if starts and 0 < per_node < needed:
        raise UserError(
            f"teacher.n_servers={teacher.n_servers} x teacher.tp_size={teacher.tp_size} beside {ranks} trainer ranks "
            f"and {servers} server ranks need {needed} GPUs of one machine, and cluster.gpus_per_node={per_node}; "
            "lower them, start the teacher elsewhere and give teacher.addresses, or set teacher.source=trainer"
        )


def _check_hint(config: Config, teacher: TeacherConfig, algorithm: OPDConfig) -> None:
    if not teacher.hint:
        if teacher.source == "policy":
            raise UserError(
                "teacher.source=policy without teacher.hint: the student would be its own teacher; give a hint, such "
                'as "The answer is {answer}."'
            )
        return
    hint_columns(teacher.hint)
    if config.method == "sft":
        raise UserError("teacher.hint is for prompts of method=rl, and method=sft has none; leave it out")
    if config.rollout.workflow != "rlvr" or config.rollout.rollout_func:
        raise UserError(
            f"teacher.hint stands in a prompt of one turn, and rollout.workflow={config.rollout.workflow} makes its "
            "own; set it to rlvr without rollout_func, or leave the hint out"
        )
    if algorithm.divergence == "full":
        raise UserError(
            "teacher.hint gives teacher and student sequences of other lengths, and algorithm.divergence=full reads "
            "both at once; set it to top_k or sampled"
        )
    if not teacher.max_prompt_tokens:
        raise UserError("teacher.hint needs teacher.max_prompt_tokens, the tokens of the longest prompt with it")
    needed, limit = teacher.max_prompt_tokens + config.gconfig.max_new_tokens, config.actor.max_tokens_per_mb
    if needed > limit:
        raise UserError(
            f"teacher.max_prompt_tokens={teacher.max_prompt_tokens} + gconfig.max_new_tokens="
            f"{config.gconfig.max_new_tokens} = {needed} tokens do not fit into actor.max_tokens_per_mb={limit}; raise "
            f"it to at least {needed}"
        )


def check_teacher_model(config: Config, model: PretrainedConfig, teacher: PretrainedConfig) -> None:
    """Refuses a teacher whose layout, vocabulary or positions do not fit the run."""
    path = config.teacher.path
    if config.teacher.source == "trainer":
        try:
            run_all(actor_checks.model_checks(teacher_engine(config), config.parallel, teacher, config.determinism))
        except UserError as error:
            raise UserError(f"teacher.path={path} does not fit the trainer's ranks: {error}") from error
    common = min(model.vocab_size, teacher.vocab_size)
    if isinstance(config.algorithm, OPDConfig) and config.algorithm.divergence == "top_k":
        check_top_k(config.algorithm.top_k, common)
    longest = max(longest_sequence(config) or 0, config.teacher.max_prompt_tokens + config.gconfig.max_new_tokens)
    if config.teacher.source != "policy" and longest > teacher.max_position_embeddings:
        raise UserError(
            f"teacher.path={path} has max_position_embeddings={teacher.max_position_embeddings}, below sequences of "
            f"{longest} tokens; shorten them, or choose another teacher"
        )


def check_top_k(top_k: int, vocab_size: int) -> None:
    """Refuses more likely tokens than the vocabulary has."""
    if top_k > vocab_size:
        raise UserError(
            f"algorithm.top_k={top_k} exceeds the vocabulary of {vocab_size} tokens that student and teacher share; "
            "lower it, or set algorithm.divergence=full"
        )


def check_tokenizers(student: Any, teacher: Any, path: str) -> None:
    """Refuses a teacher whose tokenizer gives another meaning to a token id.

    Ids past the tokenizer's are padding of the vocabulary, and may differ in number.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    first = different[0]
    raise UserError(
        f"teacher.path={path} has another tokenizer: {len(different)} tokens differ, such as {first!r} with id "
        f"{ours.get(first)} here and {theirs.get(first)} there; choose a teacher with the student's tokenizer"
    )
