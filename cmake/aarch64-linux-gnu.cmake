# Cross-compiles for 64-bit Arm with Debian's compiler; the tests run under QEMU's user mode:
#   apt install g++-aarch64-linux-gnu qemu-user
#   cmake -S . -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DBNB_BUILD_TESTS=ON
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# All of the C library from the compiler's folder: on a machine that has arm64 packages as well, the loader would take
# libc.so.6 from there, and two builds of glibc do not go together.
set(sysroot /usr/aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L ${sysroot} -E LD_LIBRARY_PATH=${sysroot}/lib)
