"""A small text classifier trained by transformers' Trainer, with a collator that tokenises in the training process.
`benchmarks/peers_diagnosis.py --examples` runs it.
"""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

words = [f"word{number}" for number in range(500)]
vocabulary = {word: number for number, word in enumerate(words, 2)}


class Texts(Dataset):
    """Texts of some thousand words."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        draw = torch.randint(len(words), (4000,), generator=torch.Generator().manual_seed(index))
        return {"text": " ".join(words[number] for number in draw.tolist()), "label": index % 2}


def collate(samples):
    """Tokenises the whole texts, and cuts them."""
    tokens = [[vocabulary.get(word.lower(), 1) for word in sample["text"].split()][:32] for sample in samples]
    return {"input_ids": torch.tensor(tokens), "labels": torch.tensor([sample["label"] for sample in samples])}


def main():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words) + 2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    arguments = TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=8,
        max_steps=80,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    model = BertForSequenceClassification(config)
    Trainer(model=model, args=arguments, train_dataset=Texts(), data_collator=collate).train()


if __name__ == "__main__":
    main()
