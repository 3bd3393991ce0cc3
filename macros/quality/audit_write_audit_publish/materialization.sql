{#-
    Audit-Write-Audit-Publish: what readers see has passed its audits, or says which it has not.

    The model's rows are written to a staging table, audited there in one scan, and published in one Delta commit. The
    staging table is a managed one in a schema of its own, `<schema>__staging`, whose folder lies beside the model's
    `location_root`, on storage that every executor reaches: readers have no business there, no model refers to it, and
    dropping it drops its files, also those that a killed run left.

    Order of the writes: rejected rows, audit results, published rows. Each replaces what it wrote for the same periods
    before, so a run that dies between two of them is repaired by the next one; and an issue is on record before anybody
    can read the rows that have it.

    Files: materialization.sql, options.sql (a model's options and audits, checked), inputs.sql (the audit of the inputs),
    staging.sql (the staging table and what the run replaces), audits.sql (the one scan), judgement.sql (measured values
    and bounds), rejects.sql and results.sql (the companion tables), publish.sql, audit_within.sql (the readers' test).
-#}

{% materialization awap, adapter='spark', supported_languages=['sql'] %}
    {%- set context = lakehouse_patterns.start_materialization('awap', replaces_others=true) -%}
    {%- set options = lakehouse_patterns._awap_options(context.options) -%}
    {%- set findings, replaced = {'messages': []}, false -%}
    {%- if not context.is_empty -%}
        {%- do lakehouse_patterns._awap_audit_inputs(options.input_audits) -%}
    {%- endif -%}
    {{ run_hooks(pre_hooks) }}

    {%- do lakehouse_patterns.stage_batch(context, compiled_code) -%}
    {%- if context.is_empty -%}
        {%- if context.existing is none -%}
            {%- call statement('create_table') -%}
                {{ create_table_as(false, this, 'select * from ' ~ context.batch ~ ' where false') }}
            {%- endcall -%}
            {%- do lakehouse_patterns.persist_table_constraints(this) -%}
        {%- endif -%}
        {%- do lakehouse_patterns.publish_nothing(context) -%}
    {%- else -%}
        {%- set scope = lakehouse_patterns._awap_scope(options, context) -%}
        {%- do lakehouse_patterns._awap_stage(scope, context.batch) -%}
        {%- set findings = lakehouse_patterns._awap_findings(
            options, scope, lakehouse_patterns._awap_measure(options, scope)
        ) -%}
        {%- if findings.fail -%}
            {%- do adapter.drop_relation(scope.staging) -%}
            {%- do exceptions.raise_compiler_error(
                'lakehouse_patterns: nothing was published to ' ~ this ~ '. ' ~ (findings.messages | join('. '))
            ) -%}
        {%- endif -%}

        {%- do lakehouse_patterns._awap_require_own_staging(scope.staging) -%}
        {%- if scope.target -%}
            {%- do lakehouse_patterns.persist_table_constraints(this) -%}
        {%- endif -%}
        {%- do lakehouse_patterns._awap_write_rejects(options, scope, findings) -%}
        {%- do lakehouse_patterns._awap_write_results(options, scope, findings) -%}
        {%- set replaced = lakehouse_patterns._awap_publish(options, scope, findings) -%}
        {%- do adapter.drop_relation(scope.staging) -%}
    {%- endif -%}

    {%- do lakehouse_patterns.finish_materialization(context, replaced) -%}
    {{ run_hooks(post_hooks) }}

    {%- if findings.error -%}
        {%- do exceptions.raise_compiler_error(
            'lakehouse_patterns: what passed was published to ' ~ this ~ ', but an audit of severity error has an issue. '
            ~ (findings.messages | join('. '))
        ) -%}
    {%- elif findings.messages -%}
        {%- do exceptions.warn(this ~ ': ' ~ (findings.messages | join('. '))) -%}
    {%- endif -%}

    {{ return({'relations': [this]}) }}
{% endmaterialization %}
