"""A script that does in one piece what published ones do: stand-in tensors on later stages, an optimizer from the parameters of
the bare module before anything is partitioned, all kinds of things in `user_content`, and a resume without a tag."""
import pytest

from smp_helpers import make_models, run

SCRIPT = """
import argparse
import numpy
from transformers import AutoConfig, AutoModelForCausalLM, get_linear_schedule_with_warmup
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--max_steps", type=int, default=6)
parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
parser.add_argument("--resume", type=int, default=int(os.environ["RESUME"]))
args = parser.parse_args([])

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "peer_timeout": 60})
device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
config = AutoConfig.from_pretrained(os.path.join(MODELS, "gpt2"))
with smp.model_creation(tensor_parallelism=False, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(os.path.join(MODELS, "gpt2"), config=config)
model = smp.DistributedModel(model, trace_device="gpu" if device.type == "cuda" else "cpu")

module = model.get_module()
decay = [p for n, p in module.named_parameters() if p.dim() > 1]
rest = [p for n, p in module.named_parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                              lr=args.lr, betas=tuple(args.betas))
optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale=None, dynamic_loss_scale=True,
                                     dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2})
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=args.max_steps)

@smp.step
def training(model, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss

total = 0
if args.resume:
    content = smp.resume_from_checkpoint(FOLDER + "/../checkpoints", tag=None)
    scheduler.load_state_dict(content["lr_scheduler"])
    total = content["total_steps"]
    results["content"] = [content["cli_args"], str(type(total)), int(total), type(content["model_config"]).__name__,
                          content["model_config"].n_embd]
losses = []
while total < args.max_steps:
    if smp.pp_rank() == 0:
        input_ids = ids_of(int(total)).to(device)
        mask = torch.ones_like(input_ids)
    else:  # only the first stage reads data
        input_ids, mask = torch.empty(8, 0, dtype=torch.long, device=device), torch.empty(8, 0, device=device)
    optimizer.zero_grad(set_to_none=True)
    loss = training(model, input_ids, mask, args).reduce_mean()
    optimizer.step()
    scheduler.step()
    total += 1
    losses.append(loss.item())
    if total == 3 and not args.resume:
        smp.save_checkpoint(path=FOLDER + "/../checkpoints", tag=f"total_steps{total}", partial=True, model=model,
                            optimizer=optimizer, num_kept_partial_checkpoints=2, user_content={
                                "cli_args": args.__dict__, "total_steps": numpy.int64(total), "model_config": config,
                                "lr_scheduler": scheduler.state_dict()})
results["losses"] = losses
results["lr"] = scheduler.get_last_lr()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def test_it_runs_as_written(models, tmp_path):
    whole = run(SCRIPT, 2, models, tmp_path / "whole", env={"RESUME": "0"})
    resumed = run(SCRIPT, 2, models, tmp_path / "resumed", env={"RESUME": "1"})
    assert len(whole[0]["losses"]) == 6 and whole[0]["losses"] == whole[1]["losses"]
    for before, after in zip(whole, resumed):
        assert after["losses"] == before["losses"][3:] and after["lr"] == before["lr"]
        arguments, kind, steps, config, width = after["content"]
        assert arguments == {"lr": 1e-3, "max_steps": 6, "betas": [0.9, 0.95], "resume": 0}
        assert (kind, steps, config, width) == ("<class 'numpy.int64'>", 3, "GPT2Config", 32)
