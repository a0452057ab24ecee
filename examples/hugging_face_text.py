"""A text classifier of Hugging Face's, guarded through mapping batches: black box and white box.

The text is made up, one token id a word: each class has words of its own among common ones, and foreign text has words
that no class has. The classifier is a small BERT, trained here for a few seconds; a larger one is used in the same way.
"""

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import igeood

WORDS, LENGTH, TOPICS = 90, 16, 4  # ids 0…29 are common words, then 12 words a topic; the last 12 are nobody's


def write(topics: Tensor, seed: int) -> dict[str, Tensor]:
    """Text on each topic, about half of it in the topic's own words; topic 4 is one that no class has."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(topics), LENGTH)
    common = torch.randint(30, shape, generator=generator)
    own = 30 + 12 * topics[:, None] + torch.randint(12, shape, generator=generator)
    ids = torch.where(torch.rand(shape, generator=generator) < 0.5, own, common)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": topics}


def batches(data: dict[str, Tensor], size: int = 100) -> list[dict[str, Tensor]]:
    """Batches as a data loader with a collator gives them."""
    starts = range(0, len(data["labels"]), size)
    return [{name: value[start : start + size] for name, value in data.items()} for start in starts]


def train(model: BertForSequenceClassification, data: list[dict[str, Tensor]], epochs: int) -> None:
    """Plain training; a guard only ever sees the result."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    model.train()
    for _ in range(epochs):
        for batch in data:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()


def main() -> None:
    """Train, guard twice, compare."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=TOPICS,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    topics = torch.arange(600) % TOPICS
    training, held_out, test = (batches(write(topics, seed)) for seed in (1, 2, 3))
    foreign = batches(write(torch.full((300,), TOPICS), 4))
    train(model, training, epochs=6)

    for name, make in (("black box", igeood.black_box), ("white box", igeood.white_box)):
        guard = make(model).fit(training).calibrate(held_out, tpr=0.95)  # labels are among the batch's entries
        kept, refused = guard.predict(test).is_ood, guard.predict(foreign).is_ood
        print(f"{name}: {100 * kept.float().mean():.1f}% of known topics refused, ", end="")
        print(f"{100 * refused.float().mean():.1f}% of the foreign one")
    print(f"layers read by the white box: {', '.join(guard.layers)}")
    right = guard.predict(test).label == topics
    print(f"the classifier itself is {100 * right.float().mean():.1f}% right on known topics")


if __name__ == "__main__":
    main()
