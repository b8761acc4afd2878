// A role's part in dQ: which tiles it makes, and what becomes of its parts.
#pragma once

#include "ampere/backward/block_work.cuh"
#include "ampere/backward/query_gradient.cuh"
#include "ampere/backward/turns.cuh"

namespace flash::ampere {

template <typename Kernel, DQWarps kRole>
struct QueryGradientShare {
    using Product = QueryGradient<Kernel>;
    using Part = typename Product::Part;
    static constexpr DQWarps who = Kernel::cfg.dq_warps;
    static constexpr bool takes_part =
        Kernel::makes_dQ && (who == kRole || who == DQWarps::BOTH || who == DQWarps::ALTERNATE);
    static constexpr bool ordered = Kernel::cfg.dq_sum == DQSum::ORDERED;

    const BlockWork<Kernel> &work;
    Product product;
    RingPlace<Kernel::ds_slots> place;

    FLASH_DEVICE explicit QueryGradientShare(const BlockWork<Kernel> &work)
        : work(work),
          product(work.smem,
                  work.warp + (Kernel::both_roles && kRole == DQWarps::GRADIENT ? Kernel::role_warps : 0),
                  work.lane) {}

    // dQ of visit number `visit`, at `at`; visits come in order.
    FLASH_DEVICE void make(const QueryWalk &at, int visit) {
        if constexpr (takes_part) {
            if (makes(visit)) make_part(at);
            place.advance();
        }
    }

    // Ends the turn of visit number `visit`, at `at`; one product after `make`, so that what was added there
    // has had time to arrive. `visit`: -1 before the first one.
    FLASH_DEVICE void tell(const QueryWalk &at, int visit) const {
        if constexpr (takes_part && ordered) {
            if (visit < 0 || !makes(visit) || !wanted(at)) return;
            if (const auto [number, last] = work.turn_number(at); !last)
                end_turn(turn(at), number, work.lane);
        }
    }

  private:
    static FLASH_DEVICE bool makes(int visit) {
        return who != DQWarps::ALTERNATE || visit % 2 == (kRole == DQWarps::GRADIENT);
    }

    // The warp's part of a tile may lie behind the last row or column.
    FLASH_DEVICE bool wanted(const QueryWalk &at) const {
        return work.args.dQ != nullptr && work.row_tiles_of(at) > product.first_row_tile &&
               (!Kernel::traits.padded_head || product.first_column_tile * kMmaTile < work.args.d_head);
    }
    // The part's counter: its first element, which the last block overwrites.
    FLASH_DEVICE int *turn(const QueryWalk &at) const {
        return reinterpret_cast<int *>(
            work.in_dQ(at, product.first_row_tile * kMmaM, product.first_column_tile * kMmaTile));
    }

    FLASH_DEVICE void make_part(const QueryWalk &at) {
        int turn_now = 0;
        if constexpr (ordered) {
            if (wanted(at)) turn_now = load_turn(turn(at));
        }
        Part dQ;
        dQ.clear();
        mbarrier_wait(work.barriers.full_dS(place.slot), place.parity);
        product.multiply_into(dQ, place.slot);
        work.barriers.arrive(work.barriers.empty_dS(place.slot), work.lane);
        if (!wanted(at)) return;
        const typename Product::Sums sums{work.tile_sums(at), work.row_tiles_of(at), work.sum_columns()};
        if constexpr (ordered) {
            add_in_turn(dQ, sums, at, turn_now);
        } else {
            product.add(dQ, sums, work.lane);
        }
    }

    FLASH_DEVICE void add_in_turn(Part &dQ, const typename Product::Sums &sums, const QueryWalk &at,
                                  int turn_now) const {
        const auto [number, last] = work.turn_number(at);
        wait_for_turn(turn(at), number, turn_now);
        if (last) {
            if (number > 0) product.take(dQ, sums, work.lane);
            store(dQ, at);
            return;
        }
        if (number > 0) {
            product.add(dQ, sums, work.lane);
        } else {
            product.begin(dQ, sums, work.lane);
        }
    }

    FLASH_DEVICE void store(const Part &dQ, const QueryWalk &at) const {
        const int first = at.tile * Kernel::B_r;
        const Range rows{0, work.mask.seq_len_q - first};
        const Range seeing{work.seeing_rows.begin - first, work.seeing_rows.end - first};
        product.store(dQ, work.in_dQ(at, 0, 0), work.args.dQ_strides.seq * kElementBytes, rows, seeing,
                      work.args.d_head, work.args.softmax_scale * unshifted(Kernel::dtype), work.lane);
    }
};

}  // namespace flash::ampere
