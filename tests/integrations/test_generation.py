"""`generate` after `apply`: the same tokens from the same random numbers, by a loop of our own."""

import copy
import itertools
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from foo_ops._C import Loop, Program, Progress, Register, Sampling, Sequences
from support.transformer_models import build, decoder, padding, tokens
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foo_ops.integrations.transformers import apply, decode_graph, generation

pytestmark = pytest.mark.usefixtures("one_thread")


def t5():
    return build(
        transformers.AutoModelForSeq2SeqLM,
        lambda: transformers.T5Config(
            d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6, vocab_size=97,
            decoder_start_token_id=0, eos_token_id=None,
        ),
    )  # fmt: skip


MODELS = {"llama": lambda: decoder("llama"), "T5": t5}
CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {},
    "of all": {"top_k": 0},
    "top k": {"top_k": 3, "temperature": 0.7},
    "top p": {"top_k": 0, "top_p": 0.6},
    "both": {"top_k": 20, "top_p": 0.9, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.4, "top_k": 0, "top_p": 0.95},
    "greedy with ends": {"do_sample": False, "eos_token_id": list(range(0, 97, 3))},
    "sampled with ends": {"eos_token_id": [5, 17, 40], "top_k": 10},
    "static": {"cache_implementation": "static"},
    "min p": {"min_p": 0.1, "top_k": 0},
    "min p and others": {"min_p": 0.02, "top_k": 30, "top_p": 0.95, "temperature": 2.0},
    "greedy, repetition": {"do_sample": False, "repetition_penalty": 1.4},
    "greedy, least length": {
        "do_sample": False, "min_new_tokens": 9, "eos_token_id": list(range(0, 97, 3)),
    },
    "sampled, least length": {
        "min_length": 12, "min_new_tokens": 3, "eos_token_id": list(range(0, 97, 3)),
        "repetition_penalty": 1.4,
    },
}  # fmt: skip


@pytest.fixture
def loops(monkeypatch):
    """Count the calls of `generate` that our loop serves."""
    calls, own = [], generation.generated

    def generated(*arguments):
        calls.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(generation, "generated", generated)
    return calls


def same_tokens(model, prompt, seed=0, **options):
    """Check the tokens, and the random numbers behind them; return the tokens."""
    options = {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0, **options}
    found = []
    for each in (model, apply(copy.deepcopy(model))):
        torch.manual_seed(seed)
        found.append((each.generate(prompt, **options), torch.rand(3)))
    (theirs, next_theirs), (ours, next_ours) = found
    assert torch.equal(ours, theirs)
    assert torch.equal(next_ours, next_theirs)
    assert ours.dtype == theirs.dtype
    assert ours.stride() == theirs.stride()
    return ours


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_tokens_are_the_models_own(make, options, loops):
    model = make()
    for seed, batch in ((0, 1), (1, 3)):
        same_tokens(model, tokens(batch, 7), seed, **options)
    assert len(loops) == 2


@pytest.mark.parametrize("options", [{"do_sample": False}, {"top_k": 0}, {"top_p": 0.5}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, options, loops, monkeypatch):
    """A model's own modules round otherwise, so both loops are those of the same model."""
    model, prompt = apply(decoder("llama").to(dtype)), tokens(2, 7)
    options = {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0, **options}
    torch.manual_seed(0)
    ours = model.generate(prompt, **options)
    assert len(loops) == 1
    monkeypatch.setattr(generation, "selection_of", lambda *_: None)
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompt, **options), ours)
    assert len(loops) == 1


def test_padded_prompts_and_long_answers(loops):
    """Memory of tokens and of the cache grows."""
    mask = padding("left", 7).long()
    prompt = tokens(len(mask), 7)
    model = decoder("llama", max_position_embeddings=512)
    ours = same_tokens(model, prompt, attention_mask=mask, max_new_tokens=290)
    assert ours.shape[1] == 297
    assert len(loops) == 1


class Streamer:
    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value)

    def end(self):
        self.parts.append("end")


def test_streamers(loops):
    model, prompt = decoder("llama"), tokens(1, 7)
    told = []
    for each in (model, apply(copy.deepcopy(model))):
        streamer = Streamer()
        options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        each.generate(prompt, streamer=streamer, **options)
        told.append(streamer.parts)
    assert len(loops) == 1
    assert [str(it) for it in told[0]] == [str(it) for it in told[1]]


def test_streamers_see_each_token(loops):
    """A change of the model by a streamer holds for the next token."""

    class Negative(Streamer):
        def put(self, value):
            super().put(value)
            if len(self.parts) == 9:
                with torch.no_grad():
                    model.lm_head.weight.neg_()

    found = []
    for model in (decoder("llama"), apply(decoder("llama"))):
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        found.append(model.generate(tokens(2, 7), streamer=Negative(), **options))
    assert len(loops) == 1
    assert torch.equal(*found)


# ------------------------------------------------------------------------------- tokens in one loop


def graphs_of_steps(model):
    known = vars(model)[decode_graph.GRAPHS]
    return [it for key, graphs in known.graphs.items() if key.is_step for it in graphs]


def generate(model, count, batch=1, **options):
    options = {"do_sample": False, "pad_token_id": 0, **options}
    return model.generate(tokens(batch, 7), max_new_tokens=count, **options)


def test_python_calls_of_generate_do_not_grow_with_the_tokens():
    model, counts = apply(decoder("llama")), []
    for count in (10, 10, 40):
        calls = [0]

        def profile(frame, event, argument, calls=calls):
            calls[0] += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            generate(model, count)
        finally:
            sys.setprofile(None)
        counts.append(calls[0])
    assert counts[1] == counts[2]


def test_a_model_that_changes_between_calls():
    model, own = apply(decoder("llama")), decoder("llama")
    for each in (model, own):
        generate(each, 20)
        with torch.no_grad():
            each.lm_head.weight.neg_()
    assert graphs_of_steps(model)
    assert torch.equal(generate(model, 20), generate(own, 20))


def test_embeddings_of_many_lengths_are_not_recorded_again_and_again(monkeypatch):
    """Tokens of `generate` are then fewer than those of the cache, by another number each time."""
    model, own, calls = apply(decoder("llama")), decoder("llama"), []
    record = decode_graph.record
    monkeypatch.setattr(decode_graph, "record", lambda *it: calls.append(it) or record(*it))
    counts = []
    for length in (*range(3, 11), 3):
        options = {"inputs_embeds": torch.randn(1, length, 48), "max_new_tokens": 12}
        options |= {"do_sample": False, "pad_token_id": 0}
        calls.clear()
        assert torch.equal(model.generate(**options), own.generate(**options))
        counts.append(len(calls))
    most = decode_graph.MOST_VARIANTS
    # Then the forward's graph is recorded, once.
    assert counts == [decode_graph.STEPS] * (most + 1) + [0] * (len(counts) - most - 1)


def test_two_models_take_turns():
    models = [apply(decoder("llama", num_hidden_layers=it)) for it in (1, 3)]
    expected = [generate(decoder("llama", num_hidden_layers=it), 20) for it in (1, 3)]
    for _ in range(2):
        for model, each in zip(models, expected, strict=True):
            assert torch.equal(generate(model, 20), each)


def test_threads():
    """Each generates with the same model, whose graphs they share."""
    model = apply(decoder("llama"))
    expected = [generate(decoder("llama"), 30, batch) for batch in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda batch: [generate(model, 30, batch) for _ in range(5)], (1, 2, 3))
        for each, ours in zip(expected, found, strict=True):
            assert all(torch.equal(it, each) for it in ours)


def count_tokens(model, kept):
    """Let a model count its steps."""
    own = type(model).prepare_inputs_for_generation

    def prepare(self, *arguments, **options):
        kept.append(None)
        return own(self, *arguments, **options)

    return prepare


def test_code_of_others_runs_for_each_token(monkeypatch):
    counts = {"function": [], "class": [], "hook": []}
    models = {name: apply(decoder("llama")) for name in counts}
    it = models["function"]
    it.prepare_inputs_for_generation = count_tokens(it, counts["function"]).__get__(it)
    it = models["class"]
    prepare = count_tokens(it, counts["class"])
    models["hook"].register_forward_hook(lambda *_: counts["hook"].append(None))
    expected = generate(decoder("llama"), 20)
    assert torch.equal(generate(models["function"], 20), expected)
    assert torch.equal(generate(models["hook"], 20), expected)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "prepare_inputs_for_generation", prepare)
    assert torch.equal(generate(models["class"], 20), expected)
    assert {name: len(it) for name, it in counts.items()} == dict.fromkeys(counts, 20)


def test_signals_interrupt_the_loop():
    """The whole of it takes half a minute, in which nothing else calls Python."""
    model = apply(decoder("llama", max_position_embeddings=1 << 16))
    options = {"cache_implementation": "static"}
    generate(model, 10, **options)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(model, 1 << 15, **options)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - start < 6
    assert torch.equal(generate(model, 20), generate(decoder("llama"), 20))


@pytest.mark.parametrize("name", ["llama", "mistral: windows"])
def test_the_cache_after_an_error(name):
    """A token makes the next step's logits NaN, of which no sample can be drawn."""
    found = []
    for change in (lambda model: model, apply):
        model = change(decoder(name))
        generate(model, 20)
        with torch.no_grad():
            model.model.embed_tokens.weight[20:24] = torch.nan
        cache = transformers.StaticCache(model.config, 60)
        torch.manual_seed(4)
        with pytest.raises(RuntimeError, match="nan"):
            generate(model, 50, do_sample=True, past_key_values=cache)
        values = [it for layer in cache.layers for it in (layer.keys, layer.values)]
        lengths = [vars(it).get("cumulative_length_int", 0) for it in cache.layers]
        found.append((cache.get_seq_length(), lengths, values))
    (length, lengths, theirs), (our_length, our_lengths, ours) = found
    # Steps are recorded, and then run in a loop.
    assert our_length == length > 7 + decode_graph.STEPS + 3
    assert our_lengths == lengths
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_the_cache_after_a_loop():
    """A later call, of `generate` or of the model, goes on where the loop has ended."""
    found = []
    for model in (decoder("llama"), apply(decoder("llama"))):
        cache = transformers.DynamicCache(config=model.config)
        for count in (12, 9):
            output = generate(model, count, past_key_values=cache)
            assert cache.get_seq_length() == output.shape[1] - 1
            cache.crop(6 - cache.get_seq_length())
        with torch.no_grad():
            logits = model(tokens(1, 4), past_key_values=cache).logits
        layers = [it for layer in cache.layers for it in (layer.keys, layer.values)]
        found.append([output, logits, *(it.contiguous() for it in layers)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Never(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, 3] = -torch.inf
        return scores


OTHERS = {
    "a processor": {"logits_processor": LogitsProcessorList([Never()])},
    "n-grams": {"no_repeat_ngram_size": 3},
    "min p of several": {
        "top_k": 0,
        "logits_processor": LogitsProcessorList([MinPLogitsWarper(0.1, min_tokens_to_keep=3)]),
    },
    "another least length": {
        "eos_token_id": 5,
        "logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(9, [5, 6])]),
    },
    "a time": {"max_time": 1e6},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "another filter": {
        "logits_processor": LogitsProcessorList([TopKLogitsWarper(5, filter_value=-3.0)])
    },
    "the answer's repetitions": {
        "logits_processor": LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=7)]
        )
    },
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_calls_are_left_to_transformers(options, loops):
    same_tokens(decoder("llama"), tokens(2, 7), **options)
    assert not loops


def test_prompts_of_int32_are_left_to_transformers(loops):
    ours = same_tokens(decoder("llama"), tokens(2, 7).int(), eos_token_id=[5, 17, 40])
    assert ours.dtype == torch.int64
    assert not loops


def test_processors_in_another_order_are_left_to_transformers():
    temperature, top_k = TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)
    assert generation.sampling_of([temperature, top_k], []).top_k == 5
    assert generation.sampling_of([top_k, temperature], []) is None
    assert generation.sampling_of([temperature, temperature], []) is None
    assert generation.sampling_of([temperature, top_k], [], is_greedy=True) is None


def test_outputs_with_scores_are_left_to_transformers(loops):
    model, prompt = decoder("llama"), tokens(2, 7)
    options = {"max_new_tokens": 5, "output_scores": True, "output_logits": True}
    found = []
    for each in (model, apply(copy.deepcopy(model))):
        torch.manual_seed(0)
        output = each.generate(
            prompt, do_sample=True, pad_token_id=0, return_dict_in_generate=True, **options
        )
        found.append(output)
    assert not loops
    for name in ("scores", "logits"):
        for one, other in zip(found[0][name], found[1][name], strict=True):
            torch.testing.assert_close(one, other)


def test_logits_that_are_nan():
    model = apply(decoder("llama"))
    model.lm_head.weight.data[5] = torch.nan
    message = "probability tensor contains either `inf`, `nan` or element < 0"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        model.generate(tokens(1, 7), do_sample=True, max_new_tokens=3, pad_token_id=0)
    # The first one that is NaN counts as the largest.
    assert (
        model.generate(tokens(1, 7), do_sample=False, max_new_tokens=3, pad_token_id=0)[0, 7] == 5
    )


# --------------------------------------------------------------------------------------- Sequences


def drawn_by_transformers(scores, ids, penalty, temperature, top_k, top_p, least, min_p):
    processors = [
        RepetitionPenaltyLogitsProcessor(penalty),
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p, min_tokens_to_keep=least)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ]
    for processor in processors:
        scores = processor(ids, scores)
    return torch.multinomial(scores.softmax(-1), 1).squeeze(1)


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 2000])
def test_samples_are_those_of_transformers(top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    for penalty, temperature, least, min_p in itertools.product(
        (1.0, 1.3), (0.1, 1.0, 5.0), (1, 4), (0.0, 0.1)
    ):
        logits = 3 * torch.randn(4, 1000, generator=generator)
        ids = torch.randint(0, 1000, (4, 30), generator=generator)
        # Equal scores, and some that are removed already.
        logits[:, ::7] = logits[:, :1]
        logits[:, 3::50] = -torch.inf
        logits[3] = 1.5
        torch.manual_seed(5)
        expected = drawn_by_transformers(
            logits.clone(), ids, penalty, temperature, top_k, top_p, least, min_p
        )
        state = torch.get_rng_state()
        torch.manual_seed(5)
        sampling = Sampling()
        sampling.repetition_penalty, sampling.temperature = penalty, temperature
        sampling.top_k, sampling.top_p, sampling.least = top_k, top_p, least
        sampling.min_p = min_p
        before = logits.clone()
        found = Sequences(ids, [], 0, sampling)
        found.append(logits)
        assert torch.equal(found.tokens()[:, 30], expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(logits, before)


def test_frequencies():
    """Samples have the probabilities of the softmax: 40,000 of them, within 5 deviations."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(40_000, 1)
    found = Sequences(torch.empty(40_000, 0, dtype=torch.int64), [], 0, Sampling())
    torch.manual_seed(0)
    found.append(logits)
    expected = logits[0].double().exp() / logits[0].double().exp().sum()
    shares = found.tokens().flatten().bincount(minlength=4) / 40_000
    deviations = (expected * (1 - expected) / 40_000).sqrt()
    assert ((shares - expected).abs() < 5 * deviations).all()


def greedy():
    sampling = Sampling()
    sampling.is_greedy = True
    return sampling


ALIKE = {
    "random": lambda it: it,
    "ties": lambda it: it.round(),
    "infinite": lambda it: it.masked_fill(it > 1, torch.inf),
    "hidden": lambda it: torch.full_like(it, -torch.inf),
    "zeros": lambda it: it.sign() * 0,
    "NaN": lambda it: it.masked_fill(it > 2, torch.nan),
    "only NaN": lambda it: it * torch.nan,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ALIKE)
def test_the_likeliest_token(kind, dtype):
    """The first of several, or of NaN."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5, 97, 1024, 1025, 5000):
        scores = ALIKE[kind](torch.randn(3, 2, count, generator=generator)).to(dtype)
        apart = torch.empty(3, 2, 2 * count, dtype=dtype)[..., ::2].copy_(scores)
        # Also the largest ones of each block of another.
        tokens = [it[:, -1].float().argmax(-1) for it in (scores, scores.flip(-1))]
        found = Sequences(torch.zeros(3, 0, dtype=torch.int64), [], 0, greedy())
        for logits in (scores, scores.flip(-1), apart, scores[:, -1]):
            found.append(logits)
        expected = torch.stack((tokens[0], tokens[1], tokens[0], tokens[0]), 1)
        assert torch.equal(found.tokens(), expected)


def test_the_likeliest_token_before_the_end():
    """An end is not taken before the least length, even if it is the likeliest."""
    sampling = greedy()
    sampling.least_length = 2
    found = Sequences(torch.zeros(3, 0, dtype=torch.int64), [1, 4], 0, sampling)
    logits = torch.tensor([[0.0, 9, 3, 4, 8], [0, 1, 7, 7, 7], [1, 2, 1, 0, 1]])
    for _ in range(3):
        found.append(logits)
    assert found.tokens().tolist() == [[3, 3, 1], [2, 2, 2], [0, 0, 1]]


def test_ends_and_padding():
    logits = torch.eye(5)
    found = Sequences(torch.zeros(3, 1, dtype=torch.int64), [2, 3], 1, greedy())
    found.append(logits[[4, 2, 4]].unsqueeze(1))
    assert found.tokens().tolist() == [[0, 4], [0, 2], [0, 4]]
    assert found.goes_on
    # The last of several scores is read.
    found.append(torch.stack((logits[[2, 2, 2]], logits[[3, 4, 4]]), 1))
    assert found.tokens().tolist() == [[0, 4, 3], [0, 2, 1], [0, 4, 4]]
    assert found.goes_on
    found.append(logits[[4, 4, 2]])
    assert found.tokens().tolist() == [[0, 4, 3, 1], [0, 2, 1, 1], [0, 4, 4, 2]]
    assert not found.goes_on
    assert found.length == 4


def test_tokens_that_are_given_to_a_loop_stay():
    """A loop shows a program all tokens so far in a tensor of its own."""
    cast = [], "aten::_to_copy", "", ((Register(0),), {"dtype": torch.float32}, (Register(1),))
    program = Program(2, [0], [1], [], [cast])
    sequences = Sequences(torch.tensor([[5, 9, 2]]), [], 0, greedy())
    tokens, progress = sequences.tokens(), Progress()
    program.run_loop(Loop([], 0, 0), 0, [tokens], sequences, 3, progress)
    assert progress.count == 3
    # The place of the largest token so far.
    assert sequences.tokens().tolist() == [[5, 9, 2, 1, 1, 1]]
    assert tokens.tolist() == [[5, 9, 2]]


def test_memory_of_sequences_grows():
    prompt, found = torch.arange(6).view(2, 3), []
    sequences = Sequences(prompt, [], 0, greedy())
    for each in range(600):
        sequences.append(torch.eye(7)[[each % 7, each % 5]])
        found.append([each % 7, each % 5])
    assert sequences.length == 603
    assert torch.equal(sequences.tokens(), torch.cat((prompt, torch.tensor(found).T), 1))


def of(batch=2):
    return Sequences(torch.zeros(batch, 5, dtype=torch.int64), [], 0, greedy())


LAYOUT = "logits must be (2, T, V) or (2, V) on the CPU, got"
WRONG = [
    (torch.zeros(4), f"{LAYOUT} [4] on cpu"),
    (torch.zeros(2, 0, 4), f"{LAYOUT} [2, 0, 4] on cpu"),
    (torch.zeros(2, 0), f"{LAYOUT} [2, 0] on cpu"),
    (torch.zeros(3, 4), f"{LAYOUT} [3, 4] on cpu"),
    (torch.zeros(2, 4, device="foo"), f"{LAYOUT} [2, 4] on foo:0"),
]


@pytest.mark.parametrize(("logits", "message"), WRONG)
def test_wrong_logits(logits, message):
    sequences = of()
    with pytest.raises(ValueError, match=rf"\ASequences: {re.escape(message)}\Z"):
        sequences.append(logits)
    assert sequences.length == 5


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (torch.zeros(2, 5), "Float [2, 5] on cpu"),
        (torch.zeros(5, dtype=torch.int64), "Long [5] on cpu"),
        (torch.zeros(2, 5, dtype=torch.int64, device="foo"), "Long [2, 5] on foo:0"),
    ],
)
def test_wrong_prompts(prompt, found):
    message = re.escape(f"prompt must be int64 (B, S) on the CPU, got {found}")
    with pytest.raises(ValueError, match=rf"\ASequences: {message}\Z"):
        Sequences(prompt, [], 0, greedy())


def test_tokens_outside_of_the_vocabulary():
    sampling = Sampling()
    sampling.repetition_penalty = 1.5
    sequences = Sequences(torch.full((2, 5), 4), [], 0, sampling)
    with pytest.raises(IndexError, match=r"\ASequences: tokens must be in \[0, 4\), got 4\Z"):
        sequences.append(torch.zeros(2, 4))
