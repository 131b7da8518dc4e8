//! The `tidemill` program; see [`tidemill::cli`].

fn main() {
    tidemill::cli::main()
}
