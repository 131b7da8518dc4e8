//! Causal attention with an online softmax, in memory linear in t.
//!
//! Each head of each sample is computed separately, in tiles of queries. Lanes are queries: a
//! query's scores, its greatest score, its sum and its outputs are chains of its own lane. So
//! nothing is summed across lanes, keys and values are read in place, and only queries and outputs
//! are transposed. In units of the logarithm of 2:
//!
//! ```text
//! s_j      = q_1 k_j1, then fma(q_d, k_jd, s_j) for d from 2 on, then fma(slope, j - i, s_j),    q scaled before
//! for each tile of 64 keys, counted from the sample's first position:
//!     m    = max(m', s_j),    l = l' 2^(m' - m),    o_d = o_d' 2^(m' - m)
//!     l    = l + 2^(s_j - m),    o_d = fma(2^(s_j - m), v_jd, o_d)    for each key in order
//! ```
//!
//! Masked elements are removed by selection, not multiplied by zero, because they may be NaN. The
//! numbers of queries of a tile, of threads, and of rows of a call are not numerics; the tiles of
//! keys are.

mod backward;
mod cache;
mod forward;
mod heads;
mod products;
mod queries;
