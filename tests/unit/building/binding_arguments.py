"""Arguments for the binding: a configuration, objects that look like one, the arguments of a launch."""

import dataclasses

from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig

CONFIG = FlashForwardKernelConfig(DType.BF16, 64, 128, 32, 8, True, False, True, 2, 2, 0, False, True)
FIELDS = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}


def lookalike(**changes):
    """An object with the configuration's class name whose fields can be anything; ``...`` removes one."""
    cls = type("FlashForwardKernelConfig", (), {})
    instance = cls()
    for name, value in (FIELDS | changes).items():
        if value is not ...:
            setattr(instance, name, value)
    return instance


SHAPE, STRIDE = (2, 3, 4, 64), (768, 256, 64, 1)


ADDRESS = 1 << 45  # never read: the echo kernel looks at the output alone


def launch_arguments(**changes):
    arguments = dict.fromkeys(("q", "k", "v", "o"), ADDRESS) | {"lse": 0, "stream": 0}
    arguments |= {"q_shape": SHAPE, "k_shape": SHAPE}
    arguments |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "o_stride"), STRIDE)
    return list((arguments | {"softmax_scale": 0.125} | changes).values())
