"""The native kernels as part of a build; everything else is in pyproject.toml.

With a compiler and torch at hand a wheel carries the kernels and is tagged for its platform; otherwise, or with
``-C--build-option=--pure``, it is pure Python and everything runs in torch.
"""

import runpy
from pathlib import Path
from typing import ClassVar

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = "fuxi_torchrec/ops/native"
KERNELS = runpy.run_path(str(Path(__file__).parent / NATIVE / "build.py"))


class BuildPython(build_py):
    """The package's modules, then the kernels beside them; an editable install has the source directory's."""

    pure = False

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib) / NATIVE / KERNELS["LIBRARY"]
        if self.editable_mode:
            return
        target.unlink(missing_ok=True)  # of an earlier build
        if not self.pure:
            try:
                KERNELS["build"](target)
            except KERNELS["CannotBuildError"] as reason:
                self.announce(f"without native kernels: {reason}", level=4)


class Wheel(bdist_wheel):
    """Tagged for its platform if the kernels are in it: they fit any Python and any torch that can load them."""

    user_options: ClassVar = [*bdist_wheel.user_options, ("pure", None, "leave the native kernels out")]
    boolean_options: ClassVar = [*bdist_wheel.boolean_options, "pure"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.pure = False

    def run(self) -> None:
        build = self.get_finalized_command("build_py")
        build.pure = self.pure
        self.run_command("build_py")
        self.root_is_pure = not (Path(build.build_lib) / NATIVE / KERNELS["LIBRARY"]).exists()
        if not self.root_is_pure:  # libraries belong to the platform's directory
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel})
