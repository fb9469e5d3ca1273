import java.io.BufferedReader;
import java.io.InputStreamReader;

import org.apache.kafka.tools.ProducerPerformance;

/**
 * Kafka's kafka-producer-perf-test, run once for each line of the standard input, which is its arguments; "end" is
 * printed after each run. One virtual machine for all runs: what is compared is then not how warm it was.
 */
public final class PerformanceRuns {
    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "US-ASCII"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            ProducerPerformance.main(line.split(" "));
            System.out.println("end");
            System.out.flush();
        }
    }
}
