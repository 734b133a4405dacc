"""A GGUF file and the folder made of it are the same model with the same tokenizer."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from entroprefill_rag.engine.gguf import convert, converted_dir, sha256_of
from entroprefill_rag.errors import ModelSourceError
from entroprefill_rag.packaged import PACKAGED


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTROPREFILL_CACHE", str(root))
        yield root


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def read(file):
    """The model as transformers reads it, without our conversion."""
    return AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)


def round_weights(model):
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    return model


@pytest.fixture(scope="module")
def folder(cache, file):
    return convert(file)


def test_the_folder_is_in_the_cache_under_the_files_hash(cache, file, folder):
    assert folder.is_relative_to(cache)
    assert folder == converted_dir(sha256_of(file))
    assert folder.name.startswith(sha256_of(file)[:20])


def test_a_second_conversion_is_the_first_one(file, folder, tmp_path):
    moved = tmp_path / "other-name.gguf"
    moved.write_bytes(file.read_bytes())
    assert convert(moved, say=pytest.fail) == folder


def test_other_weights_make_another_folder(cache, folder, tmp_path):
    assert convert(tiny_gguf.write(tmp_path / "tiny.gguf", seed=1)) != folder


def test_weights_are_the_files_own_rounded_to_bfloat16(file, folder):
    direct = read(file)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert stored.dtype == torch.bfloat16
    weights = stored.state_dict()
    assert weights.keys() == direct.state_dict().keys()
    for name, weight in direct.state_dict().items():
        assert torch.equal(weights[name], weight.to(torch.bfloat16)), name


def test_logits_equal_those_of_the_rounded_original(file, folder):
    rounded = round_weights(read(file))
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        expected = rounded(input_ids=ids).logits
        assert torch.equal(stored(input_ids=ids).logits, expected)
    assert expected.std() > 0.1


def test_the_configuration_is_an_ordinary_one(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert getattr(model.config, "quantization_config", None) is None
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 2)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    assert model.config.max_position_embeddings == tiny_gguf.CONTEXT


def test_the_tokenizer_keeps_specials_template_and_length(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.chat_template == tiny_gguf.TEMPLATE
    assert tokenizer.model_max_length == tiny_gguf.CONTEXT
    text = tokenizer.apply_chat_template([{"role": "user", "content": "low"}], tokenize=False)
    assert text == "<|im_start|>user\nlow<|im_end|>\n"


def test_tokenizing_adds_nothing_and_can_be_undone(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert set(tokenizer("low")) == {"input_ids", "attention_mask"}
    for text in ("low  12 , isn't it ?", "<|im_start|>user\nx<|im_end|>\n", "日本語 🎉\r\n"):
        assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("low  12<|im_end|>").input_ids) == [
        *("low", "ĠĠ", "1", "2", "<|im_end|>")  # digits stand alone, so the run of spaces stays whole
    ]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 50])
def test_a_broken_file_is_an_error_that_names_it(cache, tmp_path, content):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ModelSourceError, match=r"broken\.gguf cannot be read as a GGUF model"):
        convert(tmp_path / "broken.gguf")
    assert not converted_dir(sha256_of(tmp_path / "broken.gguf")).exists()


def test_a_truncated_file_is_an_error(cache, file, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelSourceError, match=r"cut\.gguf cannot be read"):
        convert(tmp_path / "cut.gguf")


@pytest.mark.skipif(int(metadata.version("transformers").split(".")[0]) > 4, reason="transformers 5 reads it right")
def test_a_gemma_is_refused_where_its_tokenizer_would_come_out_wrong(cache, tmp_path):
    with pytest.raises(ModelSourceError, match="Use transformers 5"):
        convert(tiny_gguf.write(tmp_path / "gemma.gguf", architecture="gemma3"))


@pytest.mark.slow
def test_two_processes_converting_at_once_both_get_a_whole_model(file, tmp_path):
    code = (
        "import sys; from pathlib import Path; from entroprefill_rag.engine.gguf import convert;"
        "from transformers import AutoModelForCausalLM;"
        "folder = convert(Path(sys.argv[1])); AutoModelForCausalLM.from_pretrained(folder); print(folder)"
    )
    environment = os.environ | {"ENTROPREFILL_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=300)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(folders) == 1
    assert [str(path) for path in (tmp_path / "converted").iterdir() if path.is_dir()] == list(folders)


@pytest.mark.slow
@pytest.mark.model
def test_the_packaged_model_is_its_gguf_file(smollm2, smollm2_folder):
    model, tokenizer = smollm2
    package = PACKAGED["smollm2-135m"]
    [file] = (smollm2_folder.parent.parent / "models").glob(f"*/{package.weights}")
    direct = read(file)
    ids = tokenizer("In 2019,  12 of the 30 layers were enough to answer.", return_tensors="pt").input_ids
    with torch.no_grad():
        exact = direct(input_ids=ids).logits
        rounded = round_weights(direct)(input_ids=ids).logits
        stored = model(input_ids=ids).logits
    torch.testing.assert_close(stored, rounded, rtol=1e-4, atol=1e-4)
    drift = torch.nn.functional.kl_div(stored.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none")
    assert drift.sum(-1).max() < 0.01


@pytest.mark.slow
@pytest.mark.model
def test_the_packaged_models_tokenizer_survives_saving_and_splits_digits(smollm2, tmp_path):
    _, tokenizer = smollm2
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert (again.bos_token_id, again.eos_token_id, again.unk_token_id, again.pad_token_id) == (1, 2, 0, 2)
    for text in ("Hello  12,345!", "<|im_start|>user\nHi<|im_end|>\n", "日本語 🎉\r\nx\ty", "a1b2  3"):
        ids = tokenizer(text).input_ids
        assert again(text).input_ids == ids
        assert again.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("it  12").input_ids) == ["it", "ĠĠ", "1", "2"]


@pytest.mark.slow
@pytest.mark.model
def test_the_packaged_model_answers_and_stops(smollm2):
    model, tokenizer = smollm2
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
