"""`SFTTrainer` of TRL: a small random model, a tokenizer and texts from this file, no download.

The line that is added is `class MyTrainer(DCPTrainerMixin, SFTTrainer)`, and `MyTrainer` where `SFTTrainer` stood.

    pip install trl
    python examples/with_others/trl_sft.py out          # stop it however you like, and run it again
"""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from dcp_plugin import CheckpointConfig, resolve_resume
from dcp_plugin.transformers import DCPTrainerMixin


class MyTrainer(DCPTrainerMixin, SFTTrainer):  # added
    checkpoint_config = CheckpointConfig(async_save=True)


set_seed(1337)
texts = [f"{one} plus {other} is {one + other}" for one in range(8) for other in range(8)]
words = ["<eos>", "<unk>", "plus", "is", *map(str, range(16))]
tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
sizes = {"vocab_size": len(words), "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

args = SFTConfig(
    sys.argv[1],
    per_device_train_batch_size=4,
    max_length=16,
    max_steps=10,
    save_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    use_cpu=True,
    bf16=False,
    report_to="none",
)
trainer = MyTrainer(model, args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
trainer.train(resume_from_checkpoint=resolve_resume("auto", args.output_dir))
