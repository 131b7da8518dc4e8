// Where documents begin inside samples: a bit for each position, as documents.cu writes them for the kernels over
// sequences.
//
// Those kernels are compiled twice. With DOCUMENTS 1 their names end in `_documents`: there the documents of a sample
// are independent of each other.
#pragma once
#include "dialect.h"

#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif

// Positions of a word. Tiles, runs and batches of positions begin at multiples of a divisor of it.
constexpr u32 WORD_POSITIONS = 32;

// start_bits[b, ceil(t / 32)]: bit i of word w of a sample is set where its position 32 w + i begins a document and is
// not the sample's first. Returns the words of the sample whose first row is given; not called where DOCUMENTS is 0.
DEVICE const u32* start_bits_of(const u32* start_bits, u32 sample_row, u32 positions) {
    return start_bits + static_cast<u64>(sample_row / positions) * ((positions + WORD_POSITIONS - 1) / WORD_POSITIONS);
}

// The bits of the positions from `first` to the end of its word, the lowest first; none after the sample.
DEVICE u32 bits_from(const u32* sample_start_bits, u32 first, u32 positions) {
    return first < positions ? sample_start_bits[first / WORD_POSITIONS] >> (first % WORD_POSITIONS) : 0;
}

// The bits of the COUNT positions before `first`, a multiple of WORD_POSITIONS, the lowest first.
template <u32 COUNT>
DEVICE u32 bits_before(const u32* sample_start_bits, u32 first) {
    static_assert(COUNT < WORD_POSITIONS, "they are all in the word before");
    if (COUNT == 0 || first == 0) return 0;
    return sample_start_bits[first / WORD_POSITIONS - 1] >> (WORD_POSITIONS - COUNT);
}
