"""A word language model that carries its hidden state from batch to batch, in plain PyTorch."""

import torch
from torch import nn

WORDS = 200
BATCH, EVAL_BATCH, BPTT = 12, 6, 16


class RNNModel(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight  # tied

    def forward(self, data, hidden=None):
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def make_corpus(length):
    """Words of which each says much of the next."""
    draw = torch.Generator().manual_seed(1)
    words, jumps = [0], torch.randint(0, 3, (length,), generator=draw).tolist()
    for jump in jumps:
        words.append((words[-1] * 7 + jump) % WORDS)
    return torch.tensor(words)


def batchify(data, batch_size):
    length = len(data) // batch_size
    return data[: length * batch_size].view(batch_size, length)


def get_batch(source, start):
    length = min(BPTT, source.size(1) - 1 - start)
    data, targets = source[:, start : start + length], source[:, start + 1 : start + 1 + length]
    return data.to(device), targets.to(device)


def repackage_hidden(hidden):
    return None if hidden is None else tuple(each.detach() for each in hidden)


def train(epoch):
    model.train()
    total = 0.0
    hidden = None
    for step, start in enumerate(range(0, train_data.size(1) - 1, BPTT)):
        data, targets = get_batch(train_data, start)
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total += loss.item()
        if step % 4 == 3:
            print(f"epoch {epoch} step {step} loss {total / 4:.6f}")
            total = 0.0


def evaluate():
    model.eval()
    total = 0.0
    hidden = None
    with torch.no_grad():
        for start in range(0, valid_data.size(1) - 1, BPTT):
            data, targets = get_batch(valid_data, start)
            output, hidden = model(data, hidden)
            total += data.size(1) * criterion(output, targets.flatten()).item()
    return total / (valid_data.size(1) - 1)


torch.manual_seed(0)
device = torch.accelerator.current_accelerator() or torch.device("cpu")
corpus = make_corpus(4000)
train_data = batchify(corpus[:3200], BATCH)
valid_data = batchify(corpus[3200:], EVAL_BATCH)
model = RNNModel(WORDS, 32, 2).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
for epoch in range(1, 3):
    train(epoch)
    print(f"epoch {epoch} valid loss {evaluate():.6f}")
