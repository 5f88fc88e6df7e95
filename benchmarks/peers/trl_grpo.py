"""TRL's step: GRPOTrainer, with vLLM in its process or with the generation of transformers.

The same work: float32 weights, SGD, no KL penalty, loss summed over tokens and divided by all sequences. It saves
nothing and logs to no tracker.

On a CPU vLLM packs the weights of linear layers and drops the originals, into which TRL's sync would load: it fails
with "no attribute 'weight_loader'". `keep_originals` lets it run. It is then timed as it is, although vLLM goes on with
the packed weights, so that no rollout follows the updates; packing again would only make it slower.
"""

import os
import socket
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from benchmarks.peers.work import STEPS_WITHOUT_END, Reporter, Work, enter, prompts, share_of_digits

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers would otherwise be bound to the same core
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
LONGEST_PROMPT = 64


def run(connection: Connection, work: Work) -> None:
    """Be a worker."""
    enter(work)
    os.environ |= ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trm_repro.policy import load_model, load_tokenizer

    reporter = Reporter(connection)

    class Reporting(TrainerCallback):
        """TRL counts updates; a step is all those of one generation."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
            """Wait for the other workers."""
            reporter.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
            """Report the step after its last update."""
            if state.global_step % work.num_updates == 0:
                reporter.step()

    def reward(completions: list[str], **_: object) -> list[float]:
        return [share_of_digits(text) for text in completions]

    is_vllm = work.engine == "vllm"
    config = GRPOConfig(
        output_dir=str(work.folder),
        per_device_train_batch_size=work.num_sequences // work.num_updates,
        num_generations=work.group_size,
        steps_per_generation=work.num_updates,
        max_completion_length=work.response_tokens,
        generation_kwargs={"ignore_eos": True} if is_vllm else {"min_new_tokens": work.response_tokens},
        use_vllm=is_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=LONGEST_PROMPT + work.response_tokens,
        loss_type="dr_grpo",
        beta=0.0,
        optim="sgd",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=STEPS_WITHOUT_END,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    if is_vllm:
        keep_originals()
    trainer = GRPOTrainer(
        model=load_model(work.model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts(512)}),
        processing_class=load_tokenizer(work.model),
        callbacks=[Reporting()],
    )
    trainer.train()


def free_port() -> int:
    """Find a port for this worker's process group; left to themselves, workers that start together take the same."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def keep_originals() -> None:
    """Have vLLM keep the weights beside their packed copies, for the rest of the process."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: pack(layer, False)).start()
