// The scan of heads over pieces of sequences, for generation: position by position, so that the cuts between pieces change no bit.
//
// A team of 32 lanes has four channels of a head; a lane holds neighbouring states of each channel in registers. A block has four teams.
// B, C and the steps of sixteen positions are loaded together into shared memory.
//
// Floor: 3 operations a state and position; of one position, 8 bytes a state.
#include "head_scan.h"

namespace {

constexpr u32 PIECE_THREADS = 128;
constexpr u32 LANES = 32, LANE_STATES = STATES / LANES;
constexpr u32 TEAM_CHANNELS = 4, PIECE_CHANNELS = PIECE_THREADS / LANES * TEAM_CHANNELS;
constexpr u32 PIECE_LENGTH = 16;

struct Shared {
    float b[PIECE_LENGTH][STATES], c[PIECE_LENGTH][STATES];
    float x[PIECE_LENGTH][PIECE_CHANNELS], y[PIECE_LENGTH][PIECE_CHANNELS];
    float delta[PIECE_LENGTH], decay[PIECE_LENGTH];
};

// A lane's states of a channel in memory.
struct StatePlace {
    float* at;
    u32 states;  // from `at` to the end of the channel; none if the lane has no states
    bool wide;
};
DEVICE Pack<LANE_STATES> take_states(const StatePlace& place) {
    if (place.wide) return load<LANE_STATES, Access::WIDE>(place.at, place.states);
    return load<LANE_STATES, Access::SINGLE>(place.at, place.states);
}
DEVICE void put_states(const StatePlace& place, const Pack<LANE_STATES>& states) {
    if (place.wide) {
        store<LANE_STATES, Access::WIDE>(place.at, states, place.states);
    } else {
        store<LANE_STATES, Access::SINGLE>(place.at, states, place.states);
    }
}

// Sums each of four values over the lanes of a team; a lane gets the sum of the value `channel_of_lane()`.
DEVICE float sum_over_team(const float (&values)[TEAM_CHANNELS]) {
    const u32 lane = threadIdx.x % LANES;
    const bool upper = lane & 16, odd = lane & 8;
    const float first = (upper ? values[2] : values[0]) + shuffle_xor(upper ? values[0] : values[2], 16);
    const float second = (upper ? values[3] : values[1]) + shuffle_xor(upper ? values[1] : values[3], 16);
    float sum = (odd ? second : first) + shuffle_xor(odd ? first : second, 8);
#pragma unroll
    for (u32 mask = 4; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
}
DEVICE u32 channel_of_lane() { return threadIdx.x % LANES / 8; }

}  // namespace

KERNEL(head_scan_piece, PIECE_THREADS, 4, HeadScanPieceArguments) {
    await_previous();
    SHARED(Shared, memory);
    Shared& shared = *memory;
    const HeadScanInputs& in = arguments.in;
    const u32 thread = threadIdx.x, lane = thread % LANES;
    const u32 blocks = (in.width + PIECE_CHANNELS - 1) / PIECE_CHANNELS;
    const Head my = head_of(in, blockIdx.x / blocks, 0);
    const u32 first_channel = blockIdx.x % blocks * PIECE_CHANNELS, channels = min(PIECE_CHANNELS, in.width - first_channel);
    const u32 team_channel = thread / LANES * TEAM_CHANNELS, first_state = lane * LANE_STATES;
    const u32 column = my.head * in.width + first_channel;
    const u32 end = arguments.lengths ? min(arguments.lengths[my.sample], in.positions) : in.positions;

    StatePlace places[TEAM_CHANNELS];
    Pack<LANE_STATES> h[TEAM_CHANNELS];
#pragma unroll
    for (u32 i = 0; i < TEAM_CHANNELS; i++) {
        const u64 channel = (static_cast<u64>(my.sample) * in.heads + my.head) * in.width + first_channel + team_channel + i;
        const bool there = team_channel + i < channels && first_state < in.states;
        places[i].at = arguments.state + (there ? channel * in.states + first_state : 0);
        places[i].states = there ? in.states - first_state : 0;
        places[i].wide = there && arguments.wide_state != 0;
        h[i] = take_states(places[i]);
    }
    for (u32 first = 0; first < end; first += PIECE_LENGTH) {
        const u32 count = min(PIECE_LENGTH, end - first), row = my.sample * in.positions + first;
        __syncthreads();  // all threads have finished the previous positions
        for_each_four<PIECE_LENGTH, STATES, PIECE_THREADS>([&](u32 i, u32 state) {
            if (i >= count) return;
            store4(&shared.b[i][state], four_of(place(in.bc, row + i, column_of_b(in, my)), state, in.states, in.wide != 0));
            store4(&shared.c[i][state], four_of(place(in.bc, row + i, column_of_c(in, my)), state, in.states, in.wide != 0));
        });
        for_each_four<PIECE_LENGTH, PIECE_CHANNELS, PIECE_THREADS>([&](u32 i, u32 channel) {
            if (i >= count) return;
            store4(&shared.x[i][channel], four_of(place(in.x, row + i, column), channel, channels, in.wide != 0));
        });
        if (thread < count) {
            const float delta = form_step(in, my, row + thread).delta;
            shared.delta[thread] = delta;
            shared.decay[thread] = decay_of(delta * my.rate);
        }
        __syncthreads();  // the positions are loaded
        for (u32 i = 0; i < count; i++) {
            const float decay = shared.decay[i], delta = shared.delta[i];
            const Pack<LANE_STATES> b = load_pack<LANE_STATES>(&shared.b[i][first_state]);
            const Pack<LANE_STATES> c = load_pack<LANE_STATES>(&shared.c[i][first_state]);
            float x[TEAM_CHANNELS], y[TEAM_CHANNELS];
            unpack(x, load4(&shared.x[i][team_channel]));
#pragma unroll
            for (u32 k = 0; k < TEAM_CHANNELS; k++) {
                const float delta_x = delta * x[k];
                y[k] = 0.0f;
#pragma unroll
                for (u32 j = 0; j < LANE_STATES; j++) {
                    h[k].at[j] = fmaf(decay, h[k].at[j], delta_x * b.at[j]);
                    y[k] = fmaf(c.at[j], h[k].at[j], y[k]);
                }
            }
            const float sum = sum_over_team(y);
            if (lane % 8 == 0) shared.y[i][team_channel + channel_of_lane()] = sum;
        }
        __syncthreads();  // all sums are written
        const float skip = in.d[my.head];
        for (u32 item = thread; item < count * PIECE_CHANNELS; item += PIECE_THREADS) {
            const u32 i = item / PIECE_CHANNELS, channel = item % PIECE_CHANNELS;
            if (channel >= channels) continue;
            const float z = widen(*place(in.z, row + i, column + channel));
            const float whole = fmaf(skip, shared.x[i][channel], shared.y[i][channel]);
            arguments.out[(row + i) * arguments.out_stride + column + channel] = gated(whole, z, sigmoid(z));
        }
    }
#pragma unroll
    for (u32 i = 0; i < TEAM_CHANNELS; i++) put_states(places[i], h[i]);
}
SHARED_BYTES(head_scan_piece, sizeof(Shared));
