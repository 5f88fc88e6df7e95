import pytest
import torch
from safetensors.torch import load_file

from tests.unit.builders import TOKENIZER, tiny_policy
from trm_repro.policy import save_policy
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.rollout.vllm.weights import checkpoint_weights


@pytest.mark.parametrize("architecture", ["dense", "moe"])
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_names_and_tensors_are_those_of_a_saved_checkpoint_and_the_head(architecture, tie_word_embeddings, tmp_path):
    policy = tiny_policy(architecture, tie_word_embeddings=tie_word_embeddings)
    save_policy(policy, TOKENIZER, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = list(checkpoint_weights(policy_weights(policy)))
    assert len(sent) == len(dict(sent))
    assert set(dict(sent)) == set(saved) | {"lm_head.weight"}
    for name, weight in sent:
        expected = saved["model.embed_tokens.weight"] if name not in saved else saved[name]
        assert torch.equal(weight, expected), name


def test_experts_are_cut_out_of_their_fused_weights_by_hand():
    gate_up = torch.arange(2 * 4 * 3).reshape(2, 4, 3).float()  # 2 experts, inner width 2, hidden 3
    down = 100 + torch.arange(2 * 3 * 2).reshape(2, 3, 2).float()
    prefix = "model.layers.0.mlp.experts."
    weights = {f"{prefix}gate_up_proj": gate_up, f"{prefix}down_proj": down, "lm_head.weight": torch.zeros(1)}
    sent = {name: weight.tolist() for name, weight in checkpoint_weights(weights)}
    assert sent == {
        f"{prefix}0.gate_proj.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        f"{prefix}0.up_proj.weight": [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]],
        f"{prefix}1.gate_proj.weight": [[12.0, 13.0, 14.0], [15.0, 16.0, 17.0]],
        f"{prefix}1.up_proj.weight": [[18.0, 19.0, 20.0], [21.0, 22.0, 23.0]],
        f"{prefix}0.down_proj.weight": [[100.0, 101.0], [102.0, 103.0], [104.0, 105.0]],
        f"{prefix}1.down_proj.weight": [[106.0, 107.0], [108.0, 109.0], [110.0, 111.0]],
        "lm_head.weight": [0.0],
    }


def test_a_head_tied_to_the_embedding_is_sent_and_one_of_its_own_is_not_replaced():
    embedding, head = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    tied = dict(checkpoint_weights({"model.embed_tokens.weight": embedding}))
    assert tied["lm_head.weight"].item() == 1.0
    untied = dict(checkpoint_weights({"model.embed_tokens.weight": embedding, "lm_head.weight": head}))
    assert untied["lm_head.weight"].item() == 2.0
