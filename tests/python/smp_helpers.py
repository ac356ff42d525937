"""Small models, and ranks as processes, for the tests of smp and finetune."""
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import preloaded
import shardsmith
from shardsmith.launcher.local import free_port

ROOT = Path(shardsmith.__file__).parent.parent
REPOSITORY = Path(__file__).parent.parent.parent

_MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from tokenizers import Tokenizer, models, pre_tokenizers
folder = sys.argv[1]
torch.manual_seed(1)
ends = dict(eos_token_id=0, bos_token_id=0)
configs = {
    "gpt2": GPT2Config(vocab_size=112, n_embd=32, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0,
                       attn_pdrop=0, **ends),
    "llama": LlamaConfig(vocab_size=112, hidden_size=32, intermediate_size=64, num_hidden_layers=5,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         tie_word_embeddings=True, **ends),
    "untied": LlamaConfig(vocab_size=112, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                          num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
                          tie_word_embeddings=False, **ends),
}
words = {word: i for i, word in enumerate(["[END]", "[UNK]", chr(10), *map(chr, range(32, 127))])}
for name, config in configs.items():
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/{name}")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.save(f"{folder}/{name}/tokenizer.json")
"""


def environment(**more):
    env = {name: value for name, value in os.environ.items()
           if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SM_HP_MP_PARAMETERS", "SHARDSMITH_DEBUG")}
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"} | more


def make_models(folder):
    maker = preloaded.Process(_MAKE, [str(folder)], environment())
    out = maker.communicate()[0]
    assert maker.returncode == 0, out
    return Path(folder)


HEAD = """
import json, os, random, signal, sys, time
import torch
import smdistributed.modelparallel.torch as smp
from shardsmith.errors import Error
MODELS, FOLDER = sys.argv[1], sys.argv[2]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
results = {}

def start(pp=1, microbatches=1, **more):
    smp.init({"pipeline_parallel_degree": pp, "microbatches": microbatches, "ddp": WORLD > pp, "peer_timeout": 60, **more})

def load(family):
    from transformers import AutoModelForCausalLM
    with smp.model_creation():
        model = AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, family))
    return smp.DistributedModel(model)

def plain(family):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, family), dtype=torch.float32).train()

def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Error as error:
        return [error.kind, str(error)]
    return None

def on_rank_0_alone(call):
    # The other ranks wait without a word.
    if RANK == 0:
        begin = time.monotonic()
        call()
        results["seconds"] = time.monotonic() - begin
        open(FOLDER + "/done", "w").close()
    else:
        while not os.path.exists(FOLDER + "/done"):
            time.sleep(0.05)

@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids)["loss"]
    model.backward(loss)
    return loss

def ids_of(step, rows=8, length=16):
    return torch.randint(1, 100, (rows, length), generator=torch.Generator().manual_seed(step))

def mine(ids):
    each = len(ids) // smp.dp_size()
    part = ids[smp.dp_rank() * each:(smp.dp_rank() + 1) * each]
    return part if smp.pp_rank() == 0 else torch.empty(each, 0)

def mean_over_replicas(loss):
    losses = smp.allgather(float(loss), smp.DP_GROUP)
    return sum(losses) / len(losses)

def finish():
    with open(os.path.join(FOLDER, f"results_{RANK}.json"), "w") as file:
        json.dump(results, file)
"""


class Ranks:
    """Processes that run the same program, each with its RANK; `fresh` ones have imported nothing before."""

    def __init__(self, body, ranks, models, folder, env=None, fresh=False):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True, parents=True)
        program = HEAD + textwrap.dedent(body) + "\nfinish()\n"
        port = free_port()
        self.processes = []
        for rank in range(ranks):
            own = {} if ranks == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            (self.folder / f"results_{rank}.json").unlink(missing_ok=True)
            env_of_rank = environment(**own, **(env or {}))
            arguments = [str(models), str(folder)]
            self.processes.append(
                subprocess.Popen([sys.executable, "-c", program, *arguments], env=env_of_rank, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True)
                if fresh else preloaded.Process(program, arguments, env_of_rank))

    def wait(self, timeout=240):
        """(exit code, output) by rank."""
        ended = []
        try:
            for process in self.processes:
                out = process.communicate(timeout=timeout)[0]
                ended.append((process.returncode, out))
        finally:
            for process in self.processes:
                process.kill()
        return ended

    def results(self, timeout=240):
        """What each rank found; all must have ended well."""
        for rank, (code, out) in enumerate(self.wait(timeout)):
            assert code == 0, f"rank {rank} ended with {code}:\n{out[-4000:]}"
        return [json.loads((self.folder / f"results_{rank}.json").read_text()) for rank in range(len(self.processes))]


def run(body, ranks, models, folder, **kwargs):
    return Ranks(body, ranks, models, folder, **kwargs).results()


def with_names(text, **names):
    """A program that knows these values."""
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + text
