# How Homebrew installs mlxtp: an environment of its own, with the versions that it was tested with.
class Mlxtp < Formula
  desc "Turns the Macs on one desk into one model server"
  url "@URL@"
  version "@VERSION@"
  sha256 "@SHA256@"
  license all_of: ["Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT"]

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  # Wheels have no room for the longer names that Homebrew would write into their libraries.
  preserve_rpath

  def install
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--constraint", "constraints.txt", ".[vision]"
    bin.install_symlink libexec/"bin/mlxtp"
  end

  def caveats
    <<~TEXT
      Try it on this Mac alone:          mlxtp demo
      Found a cluster, or join one:      mlxtp node
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlxtp version")
  end
end
