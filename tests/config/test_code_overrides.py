"""Overrides of a record that could name code, and those that can't."""

import pytest

from wellfed.config.code_overrides import names_code

OF_CODE = [
    '+callbacks.x={_target_:torch.utils.collect_env.run,command:"touch x"}',
    "+callbacks.x={a:[{b:{ _target_ : os.system}}]}",
    "workload.model._target_=torch.nn.Linear",
    "workload.data=${callbacks.x._target_}",
    "config.allow_targets=[os]",
    "++config={allow_targets:[os]}",
    "~config.allow_targets",
    "experiment@config=mine",
    "+experiment@config.allow_targets=mine",
    "hydra.searchpath=[file:///tmp/evil]",
    "+hydra.searchpath=[pkg://evil]",
    "hydra/launcher=mine",
    "hydra.run.dir=elsewhere",
    "experiment@hydra=mine",
    "--config-dir=/tmp/evil",
    "-cd=/tmp/evil",
    "experiment=../../logs/recsys/runs/a/evil",
    "workload=[recsys,../evil]",
    "workload='../evil'",
    "workload/data=../evil",
    "experiment=/tmp/evil",
    "callbacks=${oc.env:A,../evil}",
    "experiment=[${oc.env:A}]",
    "+callbacks.x=${oc.decode:'{a:b}'}",
    '+callbacks.x="${oc.create:{a:b}}"',
    "+callbacks.x=$\\{oc.decode\\:y\\}",
    "+callbacks={x:[1,{y:'${oc.dict.values:paths}'}]}",
    "+callbacks.x=${${a}:b}",
    '+callbacks.x=${oc.env:"${a}${b}"}',
    "+callbacks.x=${own:1}",
    "+workload.model.trust_remote_code=true",
    "+workload.model={weights_only:false}",
    "+workload.model.attn_implementation=somebody/kernel",
]
PLAIN = [
    "seed=5",
    "+experiment=speech/long",
    "gpu@x=8gb",
    "~callbacks",
    "callbacks=[a,b]",
    "workload.data.path=../data/a b",
    "workload.data.path='../it\\'s'",
    "paths.log_dir=/tmp/logs",
    "logger.tags=['https://h/../t',a]",
    "logger.group=${oc.env:USER,nobody}",
    "logger.name='${workload.name} ${now:%Y-%m-%d} ${hydra:runtime.choices.gpu}'",
    "+workload.data.sizes={small:[1,2],large:${workload.data.most}}",
    "workload.model.hidden=${..data.width}",
    "+workload.model.attn_implementation=sdpa",
    "workload.config.width=3",
    "sweep=loader",
    "+tags={u:'https://h/../x'}",
]


@pytest.mark.parametrize("text", OF_CODE)
def test_overrides_of_code(text):
    assert names_code(text)


@pytest.mark.parametrize("text", PLAIN)
def test_overrides_of_values(text):
    assert not names_code(text)
