import torch

from wellfed.cli.blank.model import Network


def test_the_loss_is_a_mean_over_the_batch_and_the_accuracy_a_share():
    torch.manual_seed(0)
    model = Network(3, 2)
    inputs = torch.randn(8, 3)
    labels = model(inputs).argmax(1)
    labels[:2] = 1 - labels[:2]
    whole = model.loss({"inputs": inputs, "labels": labels})
    parts = [model.loss({"inputs": inputs[cut], "labels": labels[cut]}) for cut in (slice(2), slice(2, 8))]
    assert whole.metrics["accuracy"] == 0.75
    assert [part.metrics["accuracy"] for part in parts] == [0, 1]
    torch.testing.assert_close(whole.loss, 0.25 * parts[0].loss + 0.75 * parts[1].loss)
