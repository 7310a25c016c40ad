"""LoRA adapters of `peft` on a model of transformers, trained by `transformers.Trainer`.

The line that is added is `class MyTrainer(DCPTrainerMixin, Trainer)`. `checkpoint_config` is optional: here saves run
in the background. A checkpoint has the adapters, the optimizer, the scheduler and the random numbers; the base model is
made again by the script, from a config here, by `from_pretrained` in yours.

    python examples/with_others/peft_lora.py out          # stop it however you like, and run it again
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from dcp_plugin import CheckpointConfig, resolve_resume
from dcp_plugin.transformers import DCPTrainerMixin


class MyTrainer(DCPTrainerMixin, Trainer):  # added
    checkpoint_config = CheckpointConfig(async_save=True)


set_seed(1337)
text = torch.frombuffer(bytearray(Path(torch.optim.__file__).with_name("adamw.py").read_bytes()), dtype=torch.uint8)
windows = [{"input_ids": window, "labels": window} for window in text.long().unfold(0, 32, 32)]

base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))

args = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=4,
    max_steps=10,
    save_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    use_cpu=True,
    report_to="none",
)
trainer = MyTrainer(model, args, train_dataset=windows)
trainer.train(resume_from_checkpoint=resolve_resume("auto", args.output_dir))
