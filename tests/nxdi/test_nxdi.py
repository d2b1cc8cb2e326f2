"""Models of NxD Inference as ports, against a stand-in for the library with its interface and habits."""

import json
import multiprocessing
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import processes
from configs import config_with
from layerproof.compare import stage as compare_stages
from layerproof.distributed import process_group as distributed
from layerproof.errors import StageError
from layerproof.measure.rule import LIMIT
from layerproof.model import checkpoint, handed, loading
from layerproof.model.stages import all_stages, previous_stage
from layerproof.port import nxdi, nxdi_taps, ranks, shards
from layerproof.port import stage as port_stage
from layerproof.port.contract import Stage
from layerproof.port.runner import Runner
from layerproof.rerun.preload import PACKAGES
from layerproof.taps import SHAPES, collecting
from layerproof.tensors import hdf5
from models import CONFIGS, save
from peak import Peak
from streaming import TOKENS, stream

pytestmark = [pytest.mark.nxdi, pytest.mark.slow]

LIBRARIES = Path(__file__).parent / "libraries"


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    monkeypatch.syspath_prepend(str(LIBRARIES))
    monkeypatch.setenv("NXD_CPU_MODE", "0")


@pytest.fixture(scope="module", params=["minimax_m2", "qwen3"])
def model(request, tmp_path_factory):
    return Model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def minimax(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("minimax"), "minimax_m2")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("qwen"), "qwen3")


class Model:
    """A small checkpoint with its golden."""

    def __init__(self, folder, name):
        self.name, self.checkpoint, self.golden = name, folder / "model", folder / "golden"
        save(name, self.checkpoint)
        self.config = json.loads((self.checkpoint / "config.json").read_text())
        self.stages = stream(self.checkpoint, self.golden)
        self.descriptions, _ = loading.describe_stages(self.checkpoint, self.stages, trust_remote_code=False)

    def configure(self, **keys):
        self.config |= keys
        (self.checkpoint / "config.json").write_text(json.dumps(self.config))

    def runner(self, dtype="bfloat16", **nxdi):
        module = f"neuronx_distributed_inference.models.{self.name}.modeling_{self.name}"
        port = {"backend": "nxdi", "module": module, "device": "CPU", "dtype": dtype, "nxdi": {"cpu_mode": True} | nxdi}
        return Runner.start(self.checkpoint, TOKENS, config_with(port=port))

    def input(self, stage):
        previous = previous_stage(stage, len(self.stages) - 3)
        return handed.stage_input(self.golden / f"{previous}.h5" if previous else None, stage)

    def run(self, stage, output, **nxdi):
        return port_stage.make_stage(self.runner(**nxdi), stage, self.descriptions[stage], self.input(stage), output)

    def failures(self, stage, output):
        """Why a tap does not pass, by tap."""
        golden = self.golden / f"{stage}.h5", self.golden / f"{stage}.noise.h5"
        result = compare_stages.compare_stage(stage, *golden, output, TOKENS.valid, LIMIT)
        assert result["taps"], result
        return {name: tap["reason"] for name, tap in result["taps"].items() if tap["status"] != "pass"}


@pytest.mark.parametrize("cpu_mode", [True, False])
def test_every_tap_of_a_right_model_passes(model, cpu_mode, tmp_path):
    kinds = set()
    for stage in model.stages:
        facts = model.run(stage, tmp_path / f"{stage}.h5", cpu_mode=cpu_mode)
        kinds.add(facts["kind"])
        assert facts["device"] == ("cpu" if cpu_mode else "CPU")
        assert facts["taps_change_output"] < 1e-6
        assert model.failures(stage, tmp_path / f"{stage}.h5") == {}, stage
    assert len(kinds) == 4, "all layers are of one kind"
    if model.name == "qwen3":
        assert set(model.config["layer_types"]) == {"full_attention", "sliding_attention"}


def test_a_mixture_of_experts_may_begin_with_a_dense_layer(tmp_path):
    """Its settings are those that the library documents, with dtypes as strings, which it replaces in what it is given."""
    model = Model(tmp_path, "qwen3_moe")
    runner, found = model.runner(neuron_config={"router_config": {"act_fn": "softmax", "dtype": "float32"}}), {}
    for stage in model.stages:
        port_stage.make_stage(runner, stage, model.descriptions[stage], model.input(stage), tmp_path / f"{stage}.h5")
        assert model.failures(stage, tmp_path / f"{stage}.h5") == {}, stage
        found[stage] = hdf5.read_group(tmp_path / f"{stage}.h5", "port").keys()
    assert runner.settings.port.nxdi.neuron_config["router_config"]["dtype"] == "float32", "a copy was given away"
    dense, sparse = found["layer_000"], found["layer_001"]
    assert {"attn.q_norm", "attn.k_norm"} < dense & sparse
    assert "mlp.gate" in dense - sparse and "router.scores" in sparse - dense


def test_fused_projections_come_apart_into_their_taps(qwen, tmp_path):
    qwen.run("layer_001", tmp_path / "out.h5", neuron_config={"fused_qkv": True})
    assert qwen.failures("layer_001", tmp_path / "out.h5") == {}


@pytest.mark.parametrize(
    ("mistake", "first", "reason"),
    [
        ("softmax", "router.scores", "times what is allowed"),
        ("never called", "attn.q_norm", "does not hand over"),
        ("no bias", "router.selection", "times what is allowed"),
    ],
)
def test_a_mistake_shows_at_its_tap(minimax, mistake, first, reason, tmp_path):
    minimax.run("layer_001", tmp_path / "out.h5", config={"mistake": mistake})
    failed = minimax.failures("layer_001", tmp_path / "out.h5")
    assert next(iter(failed)) == first and reason in failed[first]


def test_a_buffer_that_the_conversion_forgets_is_told(minimax, tmp_path):
    minimax.run("layer_001", tmp_path / "out.h5", config={"mistake": "no bias"})
    parameters = hdf5.read_document(tmp_path / "out.h5", hdf5.CONVERSION)["parameters"]
    initial = [name for name, entry in parameters.items() if entry["initial"]]
    assert initial == ["layer.block_sparse_moe.router.e_score_correction_bias"]


def canonical(taps):
    return {name: tap for name, tap in taps.items() if name in SHAPES}


def test_a_forced_run_goes_on_with_the_goldens_taps(minimax, tmp_path):
    """The one mistake shows at its own tap and nowhere behind it."""
    golden = canonical(hdf5.read_group(minimax.golden / "layer_001.h5", "golden"))
    runner = minimax.runner(config={"mistake": "softmax"})
    port_stage.teacher_force_stage(
        runner, "layer_001", minimax.descriptions["layer_001"], minimax.input("layer_001"), golden, tmp_path / "out.h5"
    )
    forced = hdf5.read_group(tmp_path / "out.h5", "port")
    assert forced.keys() == golden.keys()
    far = {name for name in golden if relative(forced[name], golden[name], torch.from_numpy(TOKENS.valid)) > 0.03}
    assert far == {"router.scores"}


def relative(found, expected, where=slice(None)):
    found, expected = (hdf5.to_torch(tensor)[where].double() for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm())


def test_taps_of_other_names_are_named_in_the_config(qwen, tmp_path):
    qwen.run("layer_001", tmp_path / "out.h5", taps={"attn.out": "self_attn", "mlp.gate": "mlp.up_proj"})
    assert list(qwen.failures("layer_001", tmp_path / "out.h5")) == ["mlp.gate"]


def test_a_tap_that_means_something_else_can_be_left_out(minimax, tmp_path):
    """Its own path is not taken for it, the others stay, and a graph that is traced has it neither."""
    minimax.run("layer_001", tmp_path / "out.h5", taps={"attn.q_rot": None, "mlp.out": None})
    missing = dict.fromkeys(("attn.q_rot", "mlp.out"), "the port does not hand over this tap")
    assert minimax.failures("layer_001", tmp_path / "out.h5") == missing


def test_a_configuration_is_made_as_its_class_makes_it(qwen, monkeypatch, tmp_path):
    """By a `from_pretrained` of its own, with what port.nxdi.config says; of a module that names no class, by its one."""
    from neuronx_distributed_inference.models.qwen3 import modeling_qwen3

    asked = []

    def from_pretrained(cls, path, neuron_config=None, **attributes):
        asked.append((path, neuron_config.seq_len, attributes))
        read = json.loads((Path(path) / "config.json").read_text())
        own = {"rope_theta": read["rope_parameters"]["rope_theta"]}
        return cls(neuron_config, lambda config: vars(config).update(read | own), **attributes)

    config, model = modeling_qwen3.Qwen3InferenceConfig, modeling_qwen3.NeuronQwen3ForCausalLM
    monkeypatch.setattr(config, "from_pretrained", classmethod(from_pretrained), raising=False)
    monkeypatch.delattr(model, "get_config_cls")
    qwen.run("layer_001", tmp_path / "out.h5", config={"extra": 1})
    assert set(map(str, asked)) == {str((str(qwen.checkpoint), TOKENS.ids.shape[1], {"extra": 1}))}
    assert qwen.failures("layer_001", tmp_path / "out.h5") == {}

    monkeypatch.setattr(modeling_qwen3, "Qwen3InferenceConfig", None)
    with pytest.raises(StageError, match=r"get_config_cls\(\) returns no configuration class .* Implement it"):
        qwen.runner()


def test_a_module_that_is_part_of_two_is_given_once(minimax, monkeypatch, tmp_path):
    """As gpt-oss's norm and router are, which a kernel for decoding holds as well."""
    from neuronx_distributed_inference.models.minimax_m2 import modeling_minimax_m2

    layer = modeling_minimax_m2.NeuronMiniMaxM2DecoderLayer
    build = layer.__init__

    def shared(self, *args):
        build(self, *args)
        self.block_sparse_moe.rmsnorm = self.post_attention_layernorm
        self.fused = torch.nn.Module()
        self.fused.router = self.block_sparse_moe.router

    monkeypatch.setattr(layer, "__init__", shared)
    minimax.run("layer_001", tmp_path / "out.h5")
    assert minimax.failures("layer_001", tmp_path / "out.h5") == {}
    parameters = hdf5.read_document(tmp_path / "out.h5", hdf5.CONVERSION)["parameters"]
    assert not any(entry["initial"] for entry in parameters.values())


def test_a_router_may_activate_the_chosen_alone_and_choose_groups_before(monkeypatch):
    """As those of gpt-oss and of DeepSeek-V3 do: what the experts are chosen by is tapped, and nothing else."""
    from neuronx_distributed_inference.modules.moe_v2 import RouterTopK

    class OverTopK(RouterTopK):
        apply_act_fn_over_topk = True

        def forward(self, hidden_states):
            logits = self.get_router_logits(hidden_states)
            groups = logits.unflatten(-1, (2, -1)).amax(-1).topk(1)[1]
            allowed = torch.zeros(len(logits), 2).scatter(1, groups, 1.0).repeat_interleave(4, -1).bool()
            chosen, index = torch.topk(logits.masked_fill(~allowed, 0.0), self.top_k)
            return logits, self.apply_activation_fn(chosen), index

    layer = torch.nn.Module()
    layer.feed_forward = torch.nn.Module()
    layer.feed_forward.moe = torch.nn.Module()
    layer.feed_forward.moe.router = OverTopK(8, 2, 4, "softmax", torch.float32)
    nxdi_taps.put_in(layer, 2, 3, {})
    with collecting() as taps:
        _, _, index = layer.feed_forward.moe.router(torch.randn(2, 3, 4))
    assert set(taps) == {"router.logits", "router.selection", "router.choice"}
    assert taps["router.selection"].shape == (2, 3, 8)
    assert torch.equal(taps["router.choice"].flatten(0, 1).long(), index.sort(-1).values)
    assert (taps["router.selection"] == 0).sum() == 2 * 3 * 4


def test_theta_is_that_of_the_checkpoint_in_either_spelling(tmp_path):
    """transformers 4, which NxD Inference has, does not read rope_parameters and takes a default."""
    model = Model(tmp_path, "qwen3")
    theta = model.config["rope_parameters"]["rope_theta"]
    for keys in ({"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}, {"rope_theta": theta}):
        model.config.pop("rope_parameters", None)
        model.configure(**keys)
        model.run("layer_001", tmp_path / "out.h5")
        assert model.failures("layer_001", tmp_path / "out.h5") == {}


def test_theta_is_that_of_each_kind_of_attention(tmp_path):
    model = Model(tmp_path, "qwen3")
    kinds = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0, "rope_type": "default"}}
    config = types.SimpleNamespace()
    stage = Stage("layer_001", 1, {"rope_parameters": kinds}, torch.bfloat16, {}, (1, 2), model.checkpoint)
    nxdi._load_config(config, stage)
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_scaling) == (5.0, 7.0, None)


def test_only_the_stage_is_read_and_held(minimax):
    runner = minimax.runner()
    layer = Stage("layer_001", 1, minimax.config, torch.bfloat16, {}, tuple(TOKENS.ids.shape), minimax.checkpoint)
    tensors_of = checkpoint.tensors_of_stage(minimax.checkpoint, minimax.descriptions["layer_001"])
    with Peak() as peak:
        state = runner.port.convert(layer, checkpoint.StageWeights(tensors_of))
    size = sum(tensor.nbytes for tensor in state.values())
    assert not any(tensor.is_meta for tensor in state.values())
    assert peak.bytes < 3.2 * size  # the library copies experts twice: into one tensor, and gate beside up


def test_a_tied_head_and_scaled_embeddings_are_the_models_own(tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS["qwen3"], "tie_word_embeddings", True)
    model = Model(tmp_path, "qwen3")
    for stage in ("embed", "lm_head"):
        model.run(stage, tmp_path / "out.h5")
        assert model.failures(stage, tmp_path / "out.h5") == {}
    model.run("embed", tmp_path / "plain.h5")
    model.run("embed", tmp_path / "scaled.h5", config={"embedding_multiplier": 2.0})
    plain, scaled = (hdf5.to_torch(hdf5.read(tmp_path / name, "port/out")) for name in ("plain.h5", "scaled.h5"))
    assert torch.equal(scaled, 2 * plain)


def test_rotated_heads_are_tapped_where_a_model_rotates_them_itself(minimax, monkeypatch, tmp_path):
    from neuronx_distributed_inference.models.minimax_m2 import modeling_minimax_m2

    attention = modeling_minimax_m2.NeuronMiniMaxM2Attention
    inline = attention.apply_rotary_embedding
    prepare = attention.prep_qkv_tensors
    monkeypatch.delattr(attention, "apply_rotary_embedding")
    base = modeling_minimax_m2.NeuronAttentionBase
    monkeypatch.delattr(base, "apply_rotary_embedding")

    def own(self, *args, **kwargs):
        vars(self)["apply_rotary_embedding"] = lambda *args: inline(self, *args)
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(attention, "prep_qkv_tensors", own)
    minimax.run("layer_001", tmp_path / "out.h5")
    assert minimax.failures("layer_001", tmp_path / "out.h5") == {}


def test_parts_of_one_tensor_are_no_taps(qwen, tmp_path, monkeypatch):
    from neuronx_distributed_inference.modules.attention import attention_base

    class Fused(torch.nn.Module):
        def forward(self, x):
            return torch.cat((x, x, x), -1)

    layer = torch.nn.Module()
    layer.self_attn = torch.nn.Module()
    layer.self_attn.qkv_proj = Fused()
    layer.self_attn.o_proj = attention_base.CustomRMSNorm(4)
    nxdi_taps.put_in(layer, 1, 3, {})
    with collecting() as taps:
        layer.self_attn.qkv_proj(torch.ones(1, 3, 4))
        layer.self_attn.o_proj(hidden_states=torch.ones(1, 3, 4))
    assert set(taps) == {"attn.out"}


def test_conversions_may_mix_what_is_there_and_what_is_not():
    meta, real = torch.ones(4, device="meta"), torch.zeros(4)
    with nxdi._AmongMeta():
        assert torch.cat((meta, real)).is_meta and (real + meta).is_meta
        real[:2].copy_(meta[:2])
        real[2] = meta[0]
        assert not (real + 1).is_meta


def test_a_top_k_is_watched_in_either_spelling():
    seen = []
    with nxdi_taps._TopK((3,), lambda tensor: seen.append(tensor) or tensor):
        torch.topk(torch.ones(3), 1)
        torch.ones(3).topk(1)
        torch.ones(2).topk(1)
    assert len(seen) == 2


def test_codes_without_their_scales_are_no_weights(minimax, monkeypatch, tmp_path):
    from neuronx_distributed_inference.models.minimax_m2 import modeling_minimax_m2

    model = modeling_minimax_m2.NeuronMiniMaxM2ForCausalLM
    convert = model.convert_hf_to_neuron_state_dict

    def unscaled(state, config):
        converted = convert(state, config)
        name = "layers.1.self_attn.q_proj.weight"
        return converted | {name: converted[name].to(torch.float8_e4m3fn)}

    monkeypatch.setattr(model, "convert_hf_to_neuron_state_dict", staticmethod(unscaled))
    with pytest.raises(StageError, match=r"q_proj\.weight in torch\.float8_e4m3fn, but the model has torch\.bfloat16"):
        minimax.run("layer_001", tmp_path / "out.h5")


@pytest.mark.parametrize(
    ("nxdi", "message"),
    [
        ({"config": {"mistake": "x"}, "neuron_config": {"router_config": 3}}, "does not accept the configuration"),
        ({"neuron_config": {"sequence_parallel_enabled": True}}, "sequence_parallel_enabled"),
        (
            {"neuron_config": {"tp_degree": 32}},
            "port.nxdi.neuron_config: the run sets tp_degree itself. Remove this key",
        ),
        (
            {"causal_lm": "NeuronOther"},
            r"minimax_m2.py: expected one class NeuronOther, found none\. .*; the module defines .*MiniMaxM2ForCausalLM",
        ),
        (
            {"taps": {"attn.q_norm": "self_attn.q_layernrm"}},
            r"no layer has a submodule self_attn\.q_layernrm.* self_attn\.q_norm",
        ),
        (
            {"neuron_config": {"fused_qvk": True}},
            r"neuron_config: MoENeuronConfig does not know fused_qvk\. Did you mean fused_qkv\?",
        ),
        (
            {"config": {"mistake": "raises"}},
            r"cannot be built for 1 rank \(ValueError at modeling_minimax_m2\.py:\d+: no such",
        ),
        ({"taps": {"attn.qrot": "self_attn"}}, 'port.nxdi.taps: "attn.qrot" is not a tap'),
        ({"config": {"num_local_experts": 9}}, r"cannot convert the checkpoint \(KeyError at \S+: .*experts.8"),
    ],
)
def test_what_does_not_fit_is_one_line(minimax, nxdi, message, tmp_path):
    with pytest.raises(StageError, match=message):
        minimax.run("layer_001", tmp_path / "out.h5", **nxdi)
    assert not (tmp_path / "out.h5").exists()


def afresh(function, *arguments):
    """Calls a function in a new process: one that is in a process group has no other ranks beside it. As in a job, ranks
    begin with imported packages, which are imported once for all calls.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PACKAGES))
    return processes.afresh(function, *arguments, context=server)


def run_by_ranks(model, count, stage, folder):
    """Makes a stage as a job does, into `folder`/out.h5."""
    parts = [folder / f"{rank}.h5" for rank in range(count)]
    ranks.run(count, lambda rank: model.run(stage, parts[rank]))
    shards.join(parts, folder / "out.h5", TOKENS.valid, {"tp": count})


def force_by_ranks(model, count, stage, folder):
    parts = [folder / f"{rank}.h5" for rank in range(count)]
    given = model.descriptions[stage], model.input(stage), hdf5.read_group(model.golden / f"{stage}.h5", "golden")
    ranks.run(count, lambda rank: port_stage.teacher_force_stage(model.runner(), stage, *given, parts[rank]))
    shards.join(parts, folder / "out.h5", TOKENS.valid, {"tp": count})


def trace_by_ranks(model, count, stage):
    def trace(rank):
        distributed.join_fake_group()
        return port_stage.trace_stage(
            model.runner(cpu_mode=False), stage, model.descriptions[stage], model.input(stage)
        )

    return [done.value for done in ranks.run(count, trace)]


KEYS = ("attn.k", "attn.v", "attn.k_norm", "attn.k_rot")


@pytest.mark.parametrize(("keys", "copies"), [(2, 2), (6, 1)])
def test_fewer_keys_than_ranks_and_heads_that_they_cannot_share(keys, copies, tmp_path, monkeypatch):
    """On four ranks each of two keys is there twice, and a query of zeros is added to the three of each; of six heads with
    their own keys two are added behind all, so that the last rank has none of the model's.
    """
    monkeypatch.setitem(CONFIGS["qwen3"], "num_attention_heads", 6)
    monkeypatch.setitem(CONFIGS["qwen3"], "num_key_value_heads", keys)
    model = Model(tmp_path, "qwen3")
    afresh(run_by_ranks, model, 4, "layer_001", tmp_path)
    assert model.failures("layer_001", tmp_path / "out.h5") == {}
    parts = hdf5.read_document(tmp_path / "out.h5", hdf5.RANKS)["parts"]
    assert {name: part["copies"] for name, (part,) in parts.items() if part["copies"] > 1} == (
        dict.fromkeys(KEYS, 2) if copies > 1 else {}
    )
    afresh(force_by_ranks, model, 4, "layer_001", tmp_path)
    golden, forced = (
        hdf5.read_group(path, group)
        for path, group in ((model.golden / "layer_001.h5", "golden"), (tmp_path / "out.h5", "port"))
    )
    assert all(
        relative(forced[name], golden[name], torch.from_numpy(TOKENS.valid)) < 0.02 for name in canonical(golden)
    )


def test_keys_that_are_copied_for_each_query_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS["qwen3"], "num_attention_heads", 6)
    monkeypatch.setitem(CONFIGS["qwen3"], "num_key_value_heads", 3)
    model = Model(tmp_path, "qwen3")
    afresh(run_by_ranks, model, 2, "layer_001", tmp_path)
    failures = model.failures("layer_001", tmp_path / "out.h5")
    assert failures == dict.fromkeys(KEYS, "the port does not hand over this tap")


def test_a_model_that_cannot_be_split_so_is_told(minimax, tmp_path):
    with pytest.raises(
        StageError, match=r"^norm: NeuronMiniMaxM2ForCausalLM cannot be built for 2 ranks .*97 is not div"
    ):
        afresh(run_by_ranks, minimax, 2, "norm", tmp_path)


def test_a_buffer_that_is_made_at_the_first_call_is_no_value_that_the_graph_depends_on(qwen):
    (facts, digest), (_, other) = afresh(trace_by_ranks, qwen, 2, "layer_001")
    assert facts == {"constants": [], "depends_on_values": False} and digest == other


RANK = """
import sys, torch
from pathlib import Path
from layerproof.tensors import hdf5
sys.path.insert(0, sys.argv[1])
from test_nxdi import Model, port_stage
model = Model.__new__(Model)
vars(model).update(torch.load(sys.argv[2], weights_only=False))
runner = model.runner(dtype="float32")
for stage, output in (("layer_001", sys.argv[3]), ("lm_head", sys.argv[4])):
    made = port_stage.make_stage(runner, stage, model.descriptions[stage], model.input(stage), Path(output))
"""


def test_two_ranks_hold_half_each_and_make_the_same(qwen, tmp_path):
    """The vocabulary of 97 is padded by one for two ranks."""
    torch.save(vars(qwen), tmp_path / "model.pt")
    (tmp_path / "rank.py").write_text(RANK)
    found = {}
    for count in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--no-python"]
        outputs = f"{tmp_path}/{count}-$RANK"
        script = f"{sys.executable} {tmp_path}/rank.py {Path(__file__).parent} {tmp_path}/model.pt"
        inner = ["bash", "-c", f"{script} {outputs}-layer.h5 {outputs}-head.h5"]
        paths = [str(LIBRARIES), *(str(Path(__file__).parents[2] / part) for part in ("workflow", "tests"))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            environment.pop(name, None)
        outcome = subprocess.run([*command, *inner], env=environment, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stderr[-3000:]
        for part in ("layer", "head"):
            made = [hdf5.read(tmp_path / f"{count}-{rank}-{part}.h5", "port/out") for rank in range(count)]
            assert all(relative(one, made[0]) == 0 for one in made)
            found[count, part] = made[0]
            held = hdf5.read_document(tmp_path / f"{count}-0-{part}.h5", hdf5.CONVERSION)["parameters"]
            found[count, part, "rows"] = {name: entry["shape"] for name, entry in held.items()}
    for part in ("layer", "head"):
        assert relative(found[2, part], found[1, part]) < 1e-6
    assert found[1, "layer", "rows"]["layer.mlp.gate_proj.weight"] == [96, 64]
    assert found[2, "layer", "rows"]["layer.mlp.gate_proj.weight"] == [48, 64]
    assert found[2, "head", "rows"]["part.weight"] == [49, 64]


def test_stages_of_the_stand_in_are_those_of_the_golden(minimax):
    layers = checkpoint.num_layers(minimax.config)
    assert minimax.stages == all_stages(layers)
