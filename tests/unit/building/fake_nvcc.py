"""A compiler that compiles nothing."""

from __future__ import annotations

from pathlib import Path

from flash_helpers.build.nvcc import Nvcc


class FakeNvcc:
    """A shell script in place of nvcc: copies or waits, and counts its calls in ``calls``."""

    def __init__(self, folder: Path, body: str = "", seconds: float = 0.0) -> None:
        self.calls_file = folder / "calls"
        self.path = folder / "nvcc"
        folder.mkdir(parents=True, exist_ok=True)
        # The output is made in two steps, as a compiler's is, so that a killed one leaves half a file.
        self.path.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit 0; fi\n'
            f"{body}\n"
            'for word in "$@"; do previous=$last; last=$word; [ "$previous" = -o ] && output=$word; done\n'
            f'echo "$output" >> {self.calls_file}\n'
            'printf half > "$output"\n'
            f"sleep {seconds}\n"
            'printf " whole" >> "$output"\n'
            'echo "ptxas info    : Used 32 registers, used 1 barriers"\n'
        )
        self.path.chmod(0o755)

    @property
    def nvcc(self) -> Nvcc:
        return Nvcc(self.path, (13, 0), "13.0.88")

    @property
    def calls(self) -> list[str]:
        """The output file names of every compilation and link so far."""
        return self.calls_file.read_text().split() if self.calls_file.exists() else []
