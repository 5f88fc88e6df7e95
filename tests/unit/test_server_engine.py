"""The client of rollout servers: answers read, requests dealt out, weights written in parts, errors in one line."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.builders import TOKENIZER, VOCAB_SIZE, tiny_policy
from trm_repro.config_sections import RolloutConfig
from trm_repro.errors import FaultError, InputError
from trm_repro.policy import save_policy
from trm_repro.rollout.engine import SamplingRequest, SamplingSettings
from trm_repro.rollout.synced_engine import policy_weights
from trm_repro.rollout.vllm import server
from trm_repro.rollout.vllm.weights import checkpoint_weights


def choice(top: list[dict[str, float]], tokens: list[int], reason: str = "stop") -> dict[str, object]:
    chosen = [row[f"token_id:{token}"] for row, token in zip(top, tokens, strict=True)]
    return {"token_ids": tokens, "finish_reason": reason, "logprobs": {"token_logprobs": chosen, "top_logprobs": top}}


TOP = [{"token_id:2": -0.5, "token_id:0": -1.25, "token_id:3": -4.0}, {"token_id:1": -0.125, "token_id:3": -2.5}]


def test_an_answer_becomes_a_completion():
    completion = server.read_completion(choice(TOP, [0, 1]), SamplingSettings(max_tokens=4), vocab_size=5)
    assert completion.token_ids == (0, 1)
    assert completion.logprobs.tolist() == [-1.25, -0.125]
    assert completion.finished
    assert completion.log_distribution is None


def test_all_log_probs_of_an_answer_stand_at_their_tokens():
    settings = SamplingSettings(max_tokens=4, distribution="full")
    completion = server.read_completion(choice(TOP, [0, 1], "length"), settings, vocab_size=5)
    minus = -float("inf")
    assert completion.log_distribution.tolist() == [
        [-1.25, minus, -0.5, -4.0, minus],
        [minus, -0.125, minus, -2.5, minus],
    ]
    assert not completion.finished


def test_the_likeliest_log_probs_leave_out_a_sampled_token_that_is_not_among_them():
    settings = SamplingSettings(max_tokens=4, distribution="top_k", num_top=2)
    completion = server.read_completion(choice(TOP, [3, 3]), settings, vocab_size=5)
    assert completion.top_ids.tolist() == [[2, 0], [1, 3]]
    assert completion.top_logprobs.tolist() == [[-0.5, -1.25], [-0.125, -2.5]]
    assert completion.logprobs.tolist() == [-4.0, -2.5]


def test_an_empty_answer_is_a_fault():
    with pytest.raises(FaultError, match="response has 0 tokens, 1 to 1 were asked for"):
        server.read_completion(choice([], []), SamplingSettings(max_tokens=1), vocab_size=5)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_log_probs_that_are_not_one_a_token_are_a_fault(rows):
    answer = choice(TOP, [0, 1])
    answer["logprobs"]["top_logprobs"] = (TOP * 2)[:rows]
    settings = SamplingSettings(max_tokens=4, distribution="full")
    with pytest.raises(FaultError, match=f"returned {rows} rows of log-probs for 2 tokens"):
        server.read_completion(answer, settings, vocab_size=5)


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_weight_files_hold_every_weight_once_and_never_more_than_one_lies_there(architecture, monkeypatch):
    monkeypatch.setattr(server, "FILE_BYTES", 4096)
    weights = policy_weights(tiny_policy(architecture))
    found, paths = {}, []
    for path in server.weight_files(weights, "bfloat16"):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
        paths.append(path)
    assert len(paths) > 2
    assert not any(path.exists() for path in paths)
    expected = dict(checkpoint_weights(weights))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


class Answering(BaseHTTPRequestHandler):
    """Answers like a server whose responses repeat the last token of the prompt."""

    routes: list[str]

    def do_GET(self):
        self._answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.routes.append(self.path)
        if self.path == "/v1/completions":
            token = body["prompt"][-1]
            assert body["seed"] == 7 + token
            self._answer({"choices": [choice([{f"token_id:{token}": -1.0}], [token])]})
        elif self.path == "/update_weights":
            self.send_error(500)
        else:
            self._answer({})

    def _answer(self, body: dict[str, object]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def two_servers(tmp_path):
    """Two answering servers, and an engine on them."""
    policy = tiny_policy()
    save_policy(policy, TOKENIZER, tmp_path)
    running = []
    for _ in range(2):
        handler = type("Handler", (Answering,), {"routes": []})
        running.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
    urls = tuple(f"http://127.0.0.1:{one.server_port}/" for one in running)
    engine = server.ServerEngine(RolloutConfig(placement="server", server_urls=urls), tmp_path, max_length=32)
    yield engine, [one.RequestHandlerClass.routes for one in running], policy
    for one in running:
        one.shutdown()


def test_requests_are_dealt_out_and_answers_come_back_in_order(two_servers):
    engine, routes, _ = two_servers
    assert engine.vocab_size == VOCAB_SIZE
    requests = [SamplingRequest(prompt_ids=(1, token), seed=7 + token) for token in (5, 3, 9, 4, 6)]
    completions = engine.sample(requests, SamplingSettings(max_tokens=1))
    assert [completion.token_ids for completion in completions] == [(5,), (3,), (9,), (4,), (6,)]
    assert [route.count("/v1/completions") for route in routes] == [3, 2]


def test_an_error_during_a_weight_update_names_server_and_route(two_servers):
    engine, _, policy = two_servers
    with pytest.raises(FaultError, match=r"http://127\.0\.0\.1:\d+ answered 500 to /update_weights"):
        engine.load_weights(policy_weights(policy))


def test_a_server_that_does_not_answer_is_named(tmp_path):
    save_policy(tiny_policy(), TOKENIZER, tmp_path)
    config = RolloutConfig(placement="server", server_urls=("http://127.0.0.1:9",))
    with pytest.raises(InputError, match=r"no vLLM server answers at http://127\.0\.0\.1:9; start it, or give none"):
        server.ServerEngine(config, tmp_path, max_length=32)


def test_a_server_started_here_listens_on_this_machine_only():
    command = server.server_command(RolloutConfig(placement="server"), "model", 30, 8123)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--max-model-len") + 1] == "32"  # in blocks of 16
    assert "--trust-remote-code" not in command
