"""Generated text: stable, unique, written only when it differs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flash_helpers.build.instantiations import (
    generate,
    kernel_id,
    kernel_source,
    table_source,
    write_if_different,
)
from flash_helpers.kernel_configs import ForwardKernel, ForwardTraits, get_kernels_to_build

ROOT = Path(__file__).resolve().parents[3]


def other(kernel):
    return dataclasses.replace(kernel, config=dataclasses.replace(kernel.config, B_c=32))


def test_id_is_readable_and_an_identifier(kernel):
    assert kernel_id(kernel).startswith(
        "fp16_128_64_64_4_async_eager_swizzled_load_0_2_2_tiles_buffer_opt_softmax_"
    )
    assert kernel_id(ForwardKernel(kernel.config, ForwardTraits(causal=True))).find("_causal_") > 0
    assert kernel_id(kernel).isidentifier()


def test_id_is_the_same_in_every_process(kernel):
    code = (
        "from flash_helpers.build.instantiations import kernel_id\n"
        "from flash_helpers.kernel_configs import *\n"
        f"print(kernel_id(ForwardKernel(parse_kernel_name_into_config({kernel.config.short_form()!r}))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT / "py")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == kernel_id(kernel)


def test_ids_of_all_kernels_differ():
    kernels = [
        ForwardKernel(config, traits)
        for config in get_kernels_to_build()
        for traits in (ForwardTraits(), ForwardTraits(causal=True))
    ]
    assert len({kernel_id(kernel) for kernel in kernels}) == len(kernels) > 100


def test_unit_defines_the_record_the_table_names(kernel):
    unit, table = kernel_source(kernel, 86), table_source([kernel])
    assert '#include "ampere/forward/launcher.cuh"' in unit
    assert (
        f"flash::ampere::make_record<{kernel.config.to_cpp_struct()}, {kernel.traits.to_cpp_struct()}, 86>()"
        in unit
    )
    (name,) = re.findall(r"constinit const .* (kernel_\w+) =", unit)
    assert f"extern const flash::ForwardKernelRecord<FlashForwardKernelConfig> {name};" in table
    assert f"    &{name},\n" in table
    assert 'kFamily = "ampere"' in table


def test_table_refuses_no_kernels():
    with pytest.raises(ValueError, match="exactly one direction of one family; given: none"):
        table_source([])


def test_write_if_different_keeps_the_file_that_is_right(tmp_path):
    path = tmp_path / "a" / "unit.cu"
    assert write_if_different(path, "text")
    os.utime(path, (1, 1))
    assert not write_if_different(path, "text")
    assert path.stat().st_mtime == 1
    assert write_if_different(path, "other")
    assert path.read_text() == "other"


def test_generate_writes_only_what_differs(tmp_path, kernel):
    changed = generate([kernel, other(kernel), kernel], tmp_path, 90)
    folder = tmp_path / "ampere_sm_90"
    assert sorted(path.name for path in changed) == sorted(path.name for path in folder.iterdir())
    assert len(changed) == 4  # two units, the table, the entry point
    times = {path: os.utime(path, (1, 1)) or path.stat().st_mtime for path in changed}

    assert generate([other(kernel), kernel], tmp_path, 90) == []
    third = ForwardKernel(kernel.config, ForwardTraits(causal=True))
    changed = generate([kernel, other(kernel), third], tmp_path, 90)
    assert {path.name for path in changed} == {f"{kernel_id(third)}.cu", "flash_kernels.cuh"}
    assert (folder / f"{kernel_id(kernel)}.cu").stat().st_mtime == times[folder / f"{kernel_id(kernel)}.cu"]


def test_generate_removes_stale_units_and_nothing_else(tmp_path, kernel):
    generate([kernel, other(kernel)], tmp_path, 80)
    note = tmp_path / "ampere_sm_80" / "note.txt"
    note.write_text("mine")
    stale = tmp_path / "ampere_sm_80" / f"{kernel_id(other(kernel))}.cu"
    assert stale in generate([kernel], tmp_path, 80)
    assert not stale.exists()
    assert note.exists()


def test_check_says_and_changes_nothing(tmp_path, kernel):
    assert len(generate([kernel], tmp_path, 80, check=True)) == 3
    assert list(tmp_path.iterdir()) == []
    generate([kernel], tmp_path, 80)
    assert generate([kernel], tmp_path, 80, check=True) == []
    unit = tmp_path / "ampere_sm_80" / f"{kernel_id(kernel)}.cu"
    unit.write_text(unit.read_text() + "// edited\n")
    assert generate([kernel], tmp_path, 80, check=True) == [unit]
    assert unit.read_text().endswith("// edited\n")


def test_generate_refuses_a_target_the_family_lacks(tmp_path, kernel):
    with pytest.raises(ValueError, match="target 75: kernels of the ampere family run on sm_80 and newer"):
        generate([kernel], tmp_path, 75)


def test_command_line(tmp_path):
    def run(*arguments):
        command = [
            sys.executable,
            ROOT / "tools/build/generate_kernel_instantiations.py",
            "--folder",
            tmp_path,
        ]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)

    assert run("--check").returncode == 1
    assert run().returncode == 0
    units = list((tmp_path / "ampere_sm_80").glob("*.cu"))
    assert len(units) == len(get_kernels_to_build())
    check = run("--check")
    assert (check.returncode, check.stdout) == (0, "")
    units[0].unlink()
    check = run("--check")
    assert check.returncode == 1
    assert units[0].name in check.stdout
