#include "checker.h"

#include <algorithm>

namespace fake {

namespace {

constexpr std::size_t kReports = 1000;  // texts that are kept

bool overlap(const std::vector<Range>& some, const std::vector<Range>& others) {
  return std::any_of(some.begin(), some.end(), [&](const Range& one) {
    return std::any_of(others.begin(), others.end(),
                       [&](const Range& other) { return one.overlaps(other); });
  });
}

}  // namespace

std::size_t Checker::add_stream() {
  for (auto place = ended_.begin(); place != ended_.end(); ++place) {
    const std::size_t stream = *place;
    if (host_[stream] < streams_[stream].jobs) continue;
    ended_.erase(place);
    streams_[stream].clock = host_;
    return stream;
  }
  streams_.emplace_back();
  return streams_.size() - 1;
}

void Checker::enqueue(Job& job) {
  Stream& stream = streams_[job.stream];
  job.tick = ++stream.jobs;
  stream.clock.set(job.stream, job.tick);
}

// Calls `use(access)` for the accesses that a job or host with this clock is not ordered after.
template <class Use>
void Checker::each_unordered(const Clock& clock, Use use) const {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    const auto& pending = streams_[i].pending;
    for (auto other = pending.rbegin(); other != pending.rend(); ++other) {
      if (other->job->tick <= clock[i]) break;
      use(*other);
    }
  }
}

void Checker::access(const std::shared_ptr<Job>& job, const Range& range, bool write,
                     bool in_order) {
  if (range.empty()) return;
  Stream& stream = streams_[job->stream];
  const Access mine{range, memory_.physical(range), write, job};
  each_unordered(in_order ? stream.clock : host_, [&](const Access& other) {
    if ((write || other.write) && other.job != job && overlap(mine.parts, other.parts)) {
      report("race: " + describe(mine) + ", not ordered after " + describe(other));
    }
  });
  if (memory_.unmapped(range)) {
    job->dead = true;
    report("unmapped: " + describe(mine) + ", which is not all mapped");
  }
  stream.pending.push_back(mine);
}

void Checker::host_waits(const Clock& clock) {
  host_.join(clock);
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    auto& pending = streams_[i].pending;
    while (!pending.empty() && pending.front().job->tick <= host_[i]) pending.pop_front();
  }
}

Clock Checker::everything() const {
  Clock clock;
  for (std::size_t i = 0; i < streams_.size(); ++i) clock.set(i, streams_[i].jobs);
  return clock;
}

void Checker::host_access(const Range& range, bool write) {
  const std::string does = write ? "race: the host writes " : "race: the host reads ";
  const auto parts = memory_.physical(range);
  each_unordered(host_, [&](const Access& other) {
    if ((write || other.write) && overlap(parts, other.parts)) {
      report(does + memory_.describe(range) + ", not ordered after " + describe(other));
    }
  });
}

std::vector<std::shared_ptr<Job>> Checker::invalidate(const Range& range, const char* does) {
  std::vector<std::shared_ptr<Job>> jobs;
  each_unordered(host_, [&](const Access& other) {
    if (!range.overlaps(other.range)) return;
    report(std::string(does) + " " + memory_.describe(range) + ", not ordered after " +
           describe(other));
    if (std::find(jobs.begin(), jobs.end(), other.job) == jobs.end()) jobs.push_back(other.job);
  });
  for (const auto& job : jobs) {
    auto& pending = streams_[job->stream].pending;
    pending.erase(std::remove_if(pending.begin(), pending.end(),
                                 [&](const Access& access) { return access.job == job; }),
                  pending.end());
  }
  return jobs;
}

void Checker::report(std::string text) {
  ++count_;
  if (reports_.size() < kReports) reports_.push_back(std::move(text));
}

void Checker::clear() {
  reports_.clear();
  count_ = 0;
}

std::string Checker::describe(const Access& access) const {
  const Job& job = *access.job;
  std::string text = job.kind == Kind::copy ? "copy " : "kernel ";
  text += std::to_string(job.id) + " of stream " + std::to_string(job.stream);
  if (!job.name.empty()) text += " (" + job.name + ")";
  return text + (access.write ? " writes " : " reads ") + memory_.describe(access.range);
}

}  // namespace fake
