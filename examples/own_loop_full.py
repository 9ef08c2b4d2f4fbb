"""A loop with evaluation, a scheduler, early stop, the best checkpoint, resume, and a report."""

import shardwise
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, PATIENCE, FOLDER = 8, 2, "runs/mine"


def evaluate(session: shardwise.Session, model: nn.Module, heldout: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy. Every rank takes part with as many batches: fsdp gathers weights from all of them."""
    total = torch.zeros(3, dtype=torch.float64, device=session.device)
    model.eval()
    with torch.no_grad():
        for number, (inputs, labels) in enumerate(heldout):
            outputs = model(inputs.to(session.device)).float().cpu()
            if number % session.dp == session.place.dp:  # this rank's share of the sums
                right = (outputs.argmax(1) == labels).sum()
                loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
                total += torch.tensor([loss, right, len(labels)], device=session.device)
    model.train()
    dist.all_reduce(total)  # averages are made of sums over all ranks
    return float(total[0] / total[2]), float(total[1] / total[2])


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(1200, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(1)
    train = DataLoader(TensorDataset(inputs[:1000], labels[:1000]), batch_size=16, shuffle=True)
    heldout = DataLoader(TensorDataset(inputs[1000:], labels[1000:]), batch_size=32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = shardwise.start("fsdp", output=FOLDER)
    model, optimizer = session.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * session.steps_per_epoch(train))
    best = {"loss": float("inf"), "epoch": -1}
    if (state := session.load(f"{FOLDER}/checkpoints")) is not None:
        scheduler.load_state_dict(state["scheduler"])
        best = state["best"]

    for epoch in session.epochs(EPOCHS):  # those that the checkpoint has not finished
        if epoch - best["epoch"] > PATIENCE:
            break
        for step in session.steps(train):
            for source, target in step:
                loss = nn.functional.cross_entropy(model(source), target, reduction="sum")
                step.backward(loss)
            result = step.update(optimizer, clip_norm=1.0)
            scheduler.step()
        heldout_loss, accuracy = evaluate(session, model, heldout)
        if heldout_loss < best["loss"]:  # the same on all ranks, which save together
            best = {"loss": heldout_loss, "epoch": epoch}
            session.save(f"{FOLDER}/best", keep=1)
        session.save(f"{FOLDER}/checkpoints", state={"scheduler": scheduler.state_dict(), "best": best})
        if session.ranks.is_main:
            print(f"epoch {epoch}: loss {result.loss:.3f}, held out {heldout_loss:.3f}, {accuracy:.1%} right")
    session.report()
    session.close()


if __name__ == "__main__":
    main()
