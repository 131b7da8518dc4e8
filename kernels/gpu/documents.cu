// Writes the bits of documents.h, which the kernels over sequences read.
#include "documents.h"

struct DocumentStartBits {
    u32* start_bits;    // [b, ceil(t / 32)]
    const u32* starts;  // [b t]: the position in its sample of the first token of each row's document
    u32 positions;      // t
    u32 words;          // of all samples
};

// A thread for each word.
KERNEL(document_start_bits, 256, 1, DocumentStartBits) {
    const u32 word = blockIdx.x * 256 + threadIdx.x;
    if (word >= arguments.words) return;
    const u32 positions = arguments.positions;
    const u32 words_of_sample = (positions + WORD_POSITIONS - 1) / WORD_POSITIONS;
    const u32 first = word % words_of_sample * WORD_POSITIONS;
    const u32* const starts = arguments.starts + static_cast<u64>(word / words_of_sample) * positions;
    u32 bits = 0;
    for (u32 i = 0; i < WORD_POSITIONS && first + i < positions; i++) {
        const u32 position = first + i;
        if (position > 0 && starts[position] == position) bits |= 1u << i;
    }
    arguments.start_bits[word] = bits;
}
