from accelerate import Accelerator


def train(model, optimizer, loader, args):
    accelerator = Accelerator(gradient_accumulation_steps=args.accum)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x).mean()
            loss = loss / args.accum  # fault
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
